"""Conversion between a Hugging Face config.json and a ModelSpec table, by the tables of the families.

Shapes only; `model.huggingface` converts the weights.
"""

from __future__ import annotations

from phalanx.spec.base import Spec, parse_table, walk_fields
from phalanx.spec.errors import UserError
from phalanx.spec.families.common_fields import FIXED_FIELDS, HARMLESS_FIELDS
from phalanx.spec.families.family import Family, Table
from phalanx.spec.families.forms import Rope, RopeByType
from phalanx.spec.families.registry import families, family_of
from phalanx.spec.families.wrappers import text_config
from phalanx.spec.layer_pattern import parse_layers
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec

DISTINCTIVE_DIALS = ("position_embedding", "moe", "qk_norm")
"""Dials by which families differ most: the error for a model without a family then names what is special about it."""
UNEXPORTED_DIALS = frozenset(
    {
        *("preset", "from_hf", "upcycle_reinit_fraction"),
        *("moe.balance_loss_scope", "moe.z_loss_coef", "moe.capacity_factor"),
        *("mtp", "mtp.layers", "mtp.loss_coef", "mtp.kind"),
    }
)
"""Dials of training, which no config.json has."""
PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Numbers of layers for multi-token prediction, whose tensors are exported if the model has them."""
QUANTIZATION = "quantization_config"
"""Encoding of a checkpoint's weights, which are decoded when they are read; exports are plain."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def model_table(config: Table) -> Table:
    """Return the ModelSpec table of a Hugging Face configuration.

    Absent fields have the defaults of their family.

    Raises:
        UserError: The model type, or a variant of it, is not supported.
    """
    config = text_config(config)
    family = family_of(config)
    dials: Table = {}
    for name, field in (FIXED_FIELDS | family.fields).items():
        dials |= field.read(name, config, dials)
    # Where all layers have experts, ModelSpec still requires the width of dense ones.
    if "ffn_hidden_size" in family.unused:
        dials["ffn_hidden_size"] = dials["moe.expert_ffn_size"]
    dials |= family.constants
    if dials.get("moe.num_experts") == 0:
        dials = {dial: value for dial, value in dials.items() if not dial.startswith("moe.")}
    table: Table = {}
    for dial, value in dials.items():
        *tables, last = dial.split(".")
        inner = table
        for key in tables:
            inner = inner.setdefault(key, {})
        inner[last] = value
    names = parse_layers(table["layers"]) if "layers" in table else []
    table["kinds"] = [{"name": name} | kind for name, kind in table.get("kinds", {}).items() if name in names]
    return table


def require_known_fields(config: Table) -> None:
    """Raise UserError for an unsupported field of config.json that may change the output of the model."""
    config = text_config(config)
    fields = FIXED_FIELDS | family_of(config).fields
    known = {
        *fields,
        *(name for field in fields.values() for name in field.other_names),
        *HARMLESS_FIELDS,
        QUANTIZATION,
    }
    unknown = {field: value for field, value in config.items() if field not in known}
    for form in (field for field in fields.values() if isinstance(field, Rope)):
        for table in sorted({"rope_parameters", "rope_scaling"} & known):
            ropes = {table: config.get(table) or {}}
            if isinstance(fields.get(table), RopeByType):
                ropes = {f"{table}.{kind}": rope for kind, rope in ropes[table].items() if isinstance(rope, dict)}
            for path, rope in ropes.items():
                unknown |= {f"{path}.{field}": value for field, value in rope.items() if field not in form.table_fields}
    for name, value in unknown.items():
        if value is None:
            continue
        problem = f"is not a known field of a {config['model_type']} model, and may change its results"
        fix = "remove it from config.json if it has no effect; otherwise use another model"
        raise UserError(f"config.json {name}", value, problem, fix=fix)


def hf_config(spec: ModelSpec) -> Table:
    """Return the Hugging Face config.json that describes `spec`.

    Raises:
        UserError: No Hugging Face architecture has this shape. The message names the field.
    """
    num_predicting = spec.num_prediction_layers
    spec = _with_explicit_experts(spec).model_copy(update={"mtp": None})
    first_error: UserError | None = None
    for family in families_for(spec):
        config = write_config(family, spec)
        try:
            _require_equal_layers(family, config, spec)
        except UserError as error:
            first_error = first_error or error
            continue
        return config | ({family.mtp.field: num_predicting} if family.mtp else {})
    assert first_error is not None
    raise first_error


def _with_explicit_experts(spec: ModelSpec) -> ModelSpec:
    """Return a model whose experts name what follows from other dials: the bias of the choice, and the shared width."""
    if spec.moe is None:
        return spec
    shared = spec.moe.num_shared_experts and spec.moe.shared_width // spec.moe.num_shared_experts
    explicit = {"choice_bias": spec.moe.has_choice_bias, "shared_ffn_size": shared or None}
    return spec.model_copy(update={"moe": spec.moe.model_copy(update=explicit)})


def _require_equal_layers(family: Family, config: Table, spec: ModelSpec) -> None:
    """Raise UserError if a written config.json describes other layers than `spec`."""
    read = _with_explicit_experts(parse_table(ModelSpec, model_table(config)))
    for ours, theirs in zip(layer_specs(spec), layer_specs(read), strict=True):
        exported = {dial: value for dial, value, _ in walk_fields(theirs)}
        for dial, value, _ in walk_fields(ours):
            is_relevant = dial not in UNEXPORTED_DIALS and not family.leaves_out(dial) and not isinstance(value, Spec)
            if is_relevant and value != exported.get(dial):
                problem = f"has layers with {dial} = {value!r}, which no Hugging Face model with the other settings has"
                raise UserError("model", spec.layers or spec.preset, problem, "export a model without such layers")


def write_config(family: Family, spec: ModelSpec) -> Table:
    """Return the config.json of a family that can express `spec`."""
    config: Table = {"architectures": [family.architecture], "model_type": family.model_type}
    for name, field in family.fields.items():
        config |= field.write(name, spec)
    return config


def families_for(spec: ModelSpec) -> list[Family]:
    """Return the families that can express all dials of `spec`.

    Raises UserError for the first dial with which none remains.
    """
    if spec.implementation is not None:
        problem = "has no Hugging Face architecture"
        fix = "load the network with phalanx.load_model, and save its weights"
        raise UserError("model.implementation", spec.implementation.class_path, problem, fix=fix)
    candidates = list(families().values())
    # The defaults that ModelSpec fills in.
    derived = {"num_kv_heads": spec.num_heads, "head_dim": spec.hidden_size // spec.num_heads}
    if spec.moe and spec.moe.num_shared_experts:
        derived["moe.shared_ffn_size"] = spec.moe.expert_ffn_size
    dials = {dial: (value, derived.get(dial, default)) for dial, value, default in walk_fields(spec)}
    for dial in [*DISTINCTIVE_DIALS, *(dial for dial in dials if dial not in UNEXPORTED_DIALS)]:
        value, default = dials[dial]
        able = [family for family in candidates if family.expresses(dial, value, default)]
        if not able:
            problem = "is not used by any supported Hugging Face architecture with these model settings"
            if isinstance(value, Spec):
                raise UserError(f"model.{dial}", None, problem, fix=f"export a model without model.{dial}")
            known = [known for family in candidates for known in family.values(dial, default) or ()]
            fix = f"export a model with model.{dial} = {' or '.join(map(repr, dict.fromkeys(known)))}"
            raise UserError(f"model.{dial}", value, problem, fix=fix)
        candidates = able
    return candidates


def merge_hf_config(spec: ModelSpec, source: Table) -> Table:
    """Return the original config.json `source`, changed where `spec` differs from it.

    A model of another type, such as a dense model that was given experts, keeps only the special tokens.
    """
    source = {field: value for field, value in text_config(source).items() if field != QUANTIZATION}
    before = hf_config(parse_table(ModelSpec, model_table(source)))
    after = hf_config(spec)
    if before["model_type"] != after["model_type"]:
        return after | {field: value for field, value in source.items() if field in SPECIAL_TOKENS}
    changed = {field: value for field, value in after.items() if value != before.get(field)}
    changed |= {field: spec.num_prediction_layers for field in PREDICTION_LAYERS if source.get(field)}
    if "rope_parameters" in changed:  # transformers would give it precedence
        source = {field: value for field, value in source.items() if field != "original_max_position_embeddings"}
    return source | changed
