"""Loader of a RunSpec; precedence: defaults < TOML file < environment < --set."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from phalanx.spec.base import did_you_mean, parse_table
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError, UserErrorGroup
from phalanx.spec.families.config_json import model_table
from phalanx.spec.families.counted import counted_model_table, has_long_context_factors
from phalanx.spec.families.registry import COUNTED_FAMILIES, family_of
from phalanx.spec.families.wrappers import text_config
from phalanx.spec.files.hub import CONFIG_FILE, TOKENIZER_FILE, hub_file, hub_name, pin_revision
from phalanx.spec.files.replace import replace_file
from phalanx.spec.files.tables import RUN_FILE, Table, deep_merge, read_json, read_run_table, read_toml, set_path
from phalanx.spec.layers import longest_sequence
from phalanx.spec.layout import REQUIRES_DEGREE, VALID_DATA_STRATEGIES, Layout
from phalanx.spec.local_paths import check_local_path
from phalanx.spec.model import ModelSpec, MtpSpec
from phalanx.spec.run import OptimizerSpec, RunSpec, TrainingSpec

ENVIRONMENT_PREFIX = "PHALANX_"
JOB_ENVIRONMENT_VARIABLES = (
    "nodes",
    "nproc_per_node",
    "price_per_device_hour",
    "price_per_kwh",
    "pue",
    "storage_bytes_per_second",
    "failures_per_device_hour",
    "restart_seconds",
)
"""Fields of a cluster that do not describe the machine itself."""
STEP_TOKENS = 2**22
"""Tokens in a step of a run that is only a model: about those of Llama 2 (arXiv 2307.09288) and OLMoE (2409.02060)."""
MAX_SEQ_LEN = 8192
"""Maximum tokens in a sequence of such a run: those of Llama 3 (arXiv 2407.21783) before its long contexts."""
LAYOUT_FILE = "layout.json"
"""File in a run directory: the layout of the last start, if its ranks differed from those of the run file."""


def load_run(
    path: str | Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    machine: str | None = None,
    trust: bool | None = None,
) -> RunSpec:
    """Read a run file, or make a run of a model that is named instead.

    Defaults < the file < environment (PHALANX_TRAINING__STEPS=200) < overrides.

    Args:
        path: The run file, such as `phalanx init` writes it; or a model: a preset, a Hugging Face config.json or its
            directory, which starts from its weights if there are *.safetensors, or a name on the hub such as
            org/name@revision. A file of a preset's name is the file.
            The run of a model has its name, sequences of at most 8,192 tokens and about four million tokens a step,
            unless they are set.
        overrides: Fields to set, such as "training.steps=200". Without a value ("layout.dp_shard=") a field has its
            default.
        environment: The environment variables.
        machine: A machine that replaces the one of the file: a preset such as "h100", or a file by `phalanx calibrate`.
        trust: Import the components (your own model, loss ...) that the file names; None: not from a run directory.

    Returns:
        The run.

    Raises:
        UserError: A field has a wrong name or value. The message names the field, the value and the fix.

    Example:
        >>> run = phalanx.load_run("run.toml", ["training.steps=200", "layout.tp=2"], machine="h100")
        >>> run.training.steps, run.layout.tp, run.cluster.preset
        (200, 2, 'h100')
    """
    model = model_source(path)
    table = read_run_table(path, trust) if model is None else _table_of_model(path, model)
    if machine is not None and isinstance(cluster := table.get("cluster", {}), dict):
        kept_fields = [field for field in cluster if "preset" not in cluster or field in JOB_ENVIRONMENT_VARIABLES]
        table["cluster"] = {**{field: cluster[field] for field in kept_fields}, "preset": machine}
    file_layout = dict(layout) if isinstance(layout := table.get("layout", {}), dict) else {}
    variable_of_field = {}
    for name, text in sorted(environment.items()):
        _check_variable_name(name, text)
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            variable_of_field[".".join(keys)] = name
            set_path(table, keys, text, origin=name)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            problem = "is not of the form KEY=VALUE"
            raise UserError("--set", override, problem, "write, for example, --set training.steps=200")
        variable_of_field.pop(key.strip(), None)
        # Errors name entries of lists like data.source[0].
        keys = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
        set_path(table, keys, text.strip(), origin=f"--set {key}")
    _drop_inapplicable_options(table.get("layout", {}), file_layout)
    try:
        return run_from_table(table) if model is None else _run_of_model(table)
    except UserError as error:
        for user_error in error.errors if isinstance(error, UserErrorGroup) else [error]:
            if user_error.field in variable_of_field:
                user_error.problem += f" (set by {variable_of_field[user_error.field]})"
        raise


def model_source(path: str | Path) -> Table | None:
    """Return the model that is named in place of a run file, as a [model] table; None for a run file.

    Raises UserError if there is neither a file nor a preset of this name.
    """
    file = Path(check_local_path("run file", str(path)))
    if file.suffix == ".json" or (file / CONFIG_FILE).is_file() or hub_name(path):
        family = counted_family(file)
        return {"from_hf": str(path)} if family is None else counted_model_table(read_json(hf_config_file(str(path))))
    presets = preset_names("models")
    if file.is_file() or (file.exists() and str(path) not in presets) or file.suffix == ".toml":
        return None
    if str(path) in presets:
        return {"preset": str(path)}
    fix = (
        f"name one of {', '.join(presets)}; or give a config.json, or a run file (`phalanx init run.toml` creates one)"
    )
    problem = "is neither a file nor the name of a model"
    raise UserError("run file", str(path), problem, did_you_mean(file.name, presets, fix))


def counted_family(path: Path) -> str | None:
    """Return the family of a Hugging Face model that Phalanx plans but cannot train; None for others."""
    try:
        file = hf_config_file(str(path), "run file")
    except UserError as error:
        error.fix = did_you_mean(Path(path).name, preset_names("models"), error.fix)
        raise
    config = read_json(file) if file.is_file() else {}
    family = config.get("model_type")
    if not isinstance(family, str) or family not in COUNTED_FAMILIES:
        return None
    return None if family == "phi3" and not has_long_context_factors(config) else family


def require_run_file(path: str | Path) -> None:
    """Raise UserError if a path is the name of a model, which can be planned but not trained."""
    if model_source(path) is not None:
        fix = (
            f"write one with `phalanx plan {shlex.quote(str(path))} --machine MACHINE --out run.toml`, and set its data"
        )
        raise UserError("run file", str(path), "is a model, not a run file", fix)


def lacks_weights(from_hf: str | Path) -> bool:
    """Return whether there are no weights next to a Hugging Face config.json. A model on the hub has some."""
    if hub_name(from_hf):
        return False
    config = hf_config_file(str(from_hf))
    return config.name != CONFIG_FILE or not any(config.parent.glob("*.safetensors"))


def _table_of_model(path: str | Path, model: Table) -> Table:
    """Return the table of a run that is only a model: its name, its tokenizer and, without weights, its sizes."""
    table: Table = {"model": model}
    if name := re.sub(r"[^A-Za-z0-9._-]+", "-", _model_name(path, model)).lstrip("._-"):
        table["name"] = name
    if "preset" in model:
        return table
    source = pin_revision("run file", str(path))
    if (tokenizer := hf_tokenizer(source)) is not None:
        table["data"] = {"tokenizer": tokenizer}
    if "from_hf" in model:
        config = hf_config_file(source)
        directory = source if hub_name(source) else str(config.parent)
        table["model"] = model_table(read_json(config)) if lacks_weights(source) else {"from_hf": directory}
    return table


def _model_name(path: str | Path, model: Table) -> str:
    """Return the name of a model that stands in place of a run file."""
    if "preset" in model:
        return str(path)
    if name := hub_name(path):
        return name.repo.partition("/")[2]
    config = hf_config_file(str(path))
    return Path(os.path.abspath(config)).parent.name if config.name == CONFIG_FILE else config.stem


def _run_of_model(table: Table) -> RunSpec:
    """Build the run of a model, with the sequence length and the batch that nothing sets.

    These fields remain unset in the run, so that a plan lists them among its assumptions.
    """
    model = parse_table(ModelSpec, resolve_model(table["model"]), "model")
    defaults: Table = {}
    if isinstance(training := table.setdefault("training", {}), dict):
        defaults["seq_len"] = min(longest_sequence(model), MAX_SEQ_LEN)
        seq_len = training.get("seq_len", defaults["seq_len"])
        if isinstance(seq_len, int) and seq_len > 1:
            # Data-parallel ranks can divide a power of two.
            defaults["tokens_per_step"] = seq_len * 2 ** max(0, (STEP_TOKENS // seq_len).bit_length() - 1)
        defaults = {field: value for field, value in defaults.items() if field not in training}
        table = table | {"training": defaults | training}
    run = run_from_table(table)
    run.training.model_fields_set.difference_update(defaults)
    return run


def _check_variable_name(name: str, text: str) -> None:
    """Raise UserError for a variable that names a field except for an underscore after the section."""
    key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
    for section in RunSpec.model_fields if name.startswith(ENVIRONMENT_PREFIX) and "__" not in name else ():
        field = key.removeprefix(f"{section}_")
        if field in getattr(RunSpec.model_fields[section].annotation, "model_fields", ()):
            problem = "is not a valid name: two underscores must separate the section and the field"
            fix = f"write {ENVIRONMENT_PREFIX}{section.upper()}__{field.upper()}, or unset it"
            raise UserError(name, text, problem, fix)


def _drop_inapplicable_options(layout: Any, file_layout: Table) -> None:
    """Drop options of the run file that do not apply after an override.

    An override may select another strategy, or set a degree back to 1.
    """
    if not isinstance(layout, dict):
        return
    unchanged_fields = [field for field in file_layout if layout.get(field) == file_layout[field]]
    if layout.get("data_parallel") != file_layout.get("data_parallel"):
        strategy = str(layout.get("data_parallel", Layout.model_fields["data_parallel"].default))
        for field in unchanged_fields:
            if strategy not in VALID_DATA_STRATEGIES.get(field, (strategy,)):
                del layout[field]
    for field, axis in REQUIRES_DEGREE.items():
        if field in unchanged_fields and layout.get(axis, 1) == 1 and file_layout.get(axis, 1) != 1:
            layout.pop(field, None)
    method = layout.get("activation_checkpointing", "none")
    is_unneeded = method in ("none", "auto") and method != file_layout.get("activation_checkpointing", "none")
    if is_unneeded and "recomputed_blocks" in unchanged_fields:
        layout.pop("recomputed_blocks")
    if layout.get("offload") != file_layout.get("offload") and "offload_directory" in unchanged_fields:
        layout.pop("offload_directory")


def run_from_table(table: Table) -> RunSpec:
    """Build a run from a table with the content of a run file.

    Args:
        table: The fields, in tables such as "model" and "training". Presets are names.

    Returns:
        The run.

    Raises:
        UserError: A field has a wrong name or value.

    Example:
        >>> run = phalanx.run_from_table({"model": {"preset": "llama3-8b"}, "cluster": {"preset": "h100"},
        ...                               "layout": {"data_parallel": "zero1", "tp": 2}})
        >>> run.model.num_layers, run.layout.tp
        (32, 2)
    """
    table = _with_recorded_revisions(table)
    if table.get("layout") == "auto":
        table |= {"layout": {}, "auto_layout": True}
    for spec_class, path in (TrainingSpec, "training.precision"), (Layout, "layout.activation_checkpointing"):
        section, field = path.split(".")
        section_table = table.get(section)
        if not isinstance(section_table, dict) or not isinstance(value := section_table.get(field), str):
            continue
        choices = get_args(spec_class.model_fields[field].annotation)
        if value == "auto":  # a flag replaces it
            other_fields = {key: section_table[key] for key in section_table if key != field}
            table[section] = other_fields | {f"auto_{field.removeprefix('activation_')}": True}
        elif value not in choices:
            problem = f"must be {', '.join(map(repr, ('auto', *choices[:-1])))} or {choices[-1]!r}"
            raise UserError(path, value, problem, did_you_mean(value, ["auto", *choices], "use one of these values"))
    if isinstance(model := table.get("model", {}), dict):
        table["model"] = model = resolve_model(model)
        data = table.get("data", {})
        if "from_hf" in model and isinstance(data, dict) and "tokenizer" not in data:
            tokenizer = hf_tokenizer(str(model["from_hf"]))
            if tokenizer is not None:
                table["data"] = {**data, "tokenizer": tokenizer}
    training = table.get("training")
    steps = training.get("steps") if isinstance(training, dict) else None
    optimizer = table.get("optimizer", {})
    max_short_steps = 2 * OptimizerSpec.model_fields["warmup_steps"].default
    if isinstance(steps, int) and 0 < steps < max_short_steps and "warmup_steps" not in optimizer:
        table["optimizer"] = {**optimizer, "warmup_steps": steps // 2}
    if isinstance(cluster := table.get("cluster", {}), dict):
        table["cluster"] = resolve_preset(cluster, "machines", "cluster")
    return parse_table(RunSpec, table)


def _with_recorded_revisions(table: Table) -> Table:
    """Return a copy of a table whose models on the hub have the commits that the directory of the run records.

    A run that resumes uses the same files, although the branch may have moved."""
    table = dict(table)
    default = {name: RunSpec.model_fields[name].default for name in ("output_dir", "name")}
    file = Path(*(str(table.get(name, default[name])) for name in default)).expanduser() / RUN_FILE
    for section, field in (("model", "from_hf"), ("data", "tokenizer")):
        value = _string_at(table, section, field)
        if (name := hub_name(value)) is None or "@" in value or not file.is_file():
            continue
        recorded = _string_at(read_toml(file), section, field)
        if (recorded_name := hub_name(recorded)) is not None and recorded_name.repo == name.repo:
            table[section] = {**table[section], field: recorded}
    return table


def _string_at(table: Table, section: str, field: str) -> str:
    """Return the text of a field of a table that is not validated yet; "" if there is none."""
    fields = table.get(section)
    value = fields.get(field) if isinstance(fields, dict) else None
    return value if isinstance(value, str) else ""


def load_model_spec(name: str) -> ModelSpec:
    """Read the shape of a model.

    Args:
        name: A preset (`phalanx info --list`), a Hugging Face config.json or its directory, the name of a model on the
            hub, or a TOML file: a run, or only its [model] table.

    Returns:
        The model.

    Raises:
        UserError: The preset is not known, or the file cannot be read.

    Example:
        >>> phalanx.load_model_spec("run.toml").preset
        'tiny'
    """
    if Path(name).suffix == ".toml":
        table = read_run_table(name, trust=None)
        is_run = "model" in table or set(table) <= set(RunSpec.model_fields)
        return parse_table(ModelSpec, resolve_model(table.get("model", {}) if is_run else table), "model")
    return parse_table(ModelSpec, resolve_model(model_source(name) or {"from_hf": name}), "model")


def write_effective_layout(directory: Path, layout: Layout | None) -> None:
    """Write the layout of a start of the run to its directory; None stands for the layout of the run file."""
    file = directory / LAYOUT_FILE
    if layout is None:
        file.unlink(missing_ok=True)
    else:
        replace_file(file, layout.model_dump_json(exclude_defaults=True))


def with_last_used_layout(run: RunSpec, directory: Path) -> RunSpec:
    """Return a run with the layout of its last start.

    Raises UserError if the saved layout is of another version.
    """
    file = directory / LAYOUT_FILE
    if not file.exists() and not file.is_symlink():
        return run
    table = read_json(file, "layout of the last start", fix="remove the file to use the layout of run.toml")
    return run.replace(layout=parse_table(Layout, table))


def load_machine(name: str) -> ClusterSpec:
    """Read the description of a machine.

    Args:
        name: A preset (`phalanx info --list`), or a file by `phalanx calibrate`.

    Returns:
        The machine, as the `cluster` of a run.

    Raises:
        UserError: The preset is not known, or the file cannot be read.

    Example:
        >>> phalanx.load_machine("h100").memory_bytes
        85899345920
    """
    return parse_table(ClusterSpec, resolve_preset({"preset": name}, "machines", "cluster"), "cluster")


def cluster_overrides(cluster: ClusterSpec) -> Table:
    """Return the fields of this cluster that differ from its preset, or from the defaults."""
    base = load_machine(cluster.preset) if cluster.preset else ClusterSpec()
    base_table = base.model_dump(mode="json")
    table = {key: value for key, value in cluster.model_dump(mode="json").items() if value != base_table[key]}
    return {**({"preset": cluster.preset} if cluster.preset else {}), **table}


def hf_config_file(from_hf: str, field: str = "model.from_hf") -> Path:
    """Return the config.json of `model.from_hf`: a Hugging Face directory, the file itself, or a model on the hub.

    Raises UserError if it is on the hub and cannot be read there. `field` names the model in errors."""
    path = Path(check_local_path(field, from_hf)).expanduser()
    if name := hub_name(from_hf):
        return hub_file(field, name, CONFIG_FILE)
    return path if path.suffix == ".json" else path / CONFIG_FILE


def hf_tokenizer(from_hf: str) -> str | None:
    """Return the tokenizer of a Hugging Face model as `data.tokenizer`; None if its directory has none."""
    if hub_name(from_hf):
        return from_hf
    file = hf_config_file(from_hf).parent / TOKENIZER_FILE
    return str(file) if file.is_file() else None


RESOLVED_MODEL_FIELDS = {field for field, info in ModelSpec.model_fields.items() if info.is_required()} | {
    "norm_eps",
    "rope",
    "tie_embeddings",
}
"""Model fields in the run.toml of a run directory. The config.json was read when the run was created."""


def resolve_model(table: Table) -> Table:
    """Merge a model table over the preset or the Hugging Face config that it names."""
    if not ({"preset", "from_hf"} & set(table)) and "hidden_size" not in table:
        table = {"preset": "tiny", **table}
    source = table.get("from_hf")
    if source is None or set(table) >= RESOLVED_MODEL_FIELDS:
        return resolve_preset(table, "models", "model")
    config = hf_config_file(str(source))
    if not config.is_file():
        problem = f"has no {config.name}"
        raise UserError("model.from_hf", source, problem, "use a directory that save_pretrained has written")
    known = read_json(config)
    table = {**table, "from_hf": pin_revision("model.from_hf", str(source))}
    if isinstance(table.get("mtp"), dict):
        mtp = parse_table(MtpSpec, table["mtp"], "model.mtp")
        family_of(text_config(known)).of_mtp_layers(mtp.layers)
    return merge_model(model_table(known), table)


def merge_model(source: Table, table: Table) -> Table:
    """Merge a model table over that of a known model, whose layers `layers` replaces."""
    if "layers" in table:
        source = {name: value for name, value in source.items() if name not in ("num_layers", "full_attention_layers")}
    return deep_merge(source, table)


def resolve_preset(table: Table, folder: str, field: str) -> Table:
    """Merge a table over the preset that it names, if any.

    `folder` is "machines" or "models"; `field` is the name of the table in errors.
    """
    name = table.get("preset")
    if name is None:
        return table
    if folder == "machines" and str(name).endswith(".toml"):  # the preset in such a file is the machine's name
        machine_table = resolve_preset(read_toml(os.path.expanduser(str(name)), "machine file"), folder, field)
        return deep_merge(machine_table, {key: value for key, value in table.items() if key != "preset"})
    known_presets = preset_names(folder)
    if name not in known_presets:
        raise UserError(f"{field}.preset", name, "is not a known preset", did_you_mean(str(name), known_presets))
    preset = tomllib.loads(_presets_folder(folder).joinpath(f"{name}.toml").read_text())
    return merge_model(preset, table) if folder == "models" else deep_merge(preset, table)


def preset_names(folder: str) -> list[str]:
    """Return the names of the presets in `folder`: "models" or "machines"."""
    names = (file.name for file in _presets_folder(folder).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def _presets_folder(folder: str) -> Any:
    return resources.files("phalanx.spec") / "presets" / folder
