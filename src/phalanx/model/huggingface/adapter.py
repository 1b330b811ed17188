"""Adapters as directories of peft, the library of Hugging Face, and their products with frozen weights.

peft names an adapter by the module that it adapts. Where that is one module for several products of ours, such as
queries, keys and values, an export has their A one after another and their B as blocks of a diagonal, which is the same
function; an import gives each product the A of all, and its own rows of B."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.model.huggingface.checkpoint import ADAPTER_FILE, read_json
from phalanx.model.huggingface.export import IndexedTensor, stored_pieces, stored_shape
from phalanx.model.huggingface.safetensors_file import FileTensor, write_safetensors
from phalanx.model.huggingface.tensor_names import TensorSource, hf_sources, parameter_shapes
from phalanx.model.init import Part, PartialWeights, Weights, row_norms
from phalanx.model.nf4 import dequantize, shape_of_numbers
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config
from phalanx.spec.families.family import Family, Rows
from phalanx.spec.families.registry import family_of
from phalanx.spec.families.wrappers import text_config
from phalanx.spec.files.load import hf_config_file
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.model import model_parameters
from phalanx.spec.tuning import ADAPTER_SUFFIXES, MAGNITUDE_SUFFIX, AdapterSpec, is_adapter_parameter

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FIELD = "adapter.from_peft"
TARGETS_FIX = "set adapter.targets to the products that it adapts"
EXPERT_STACKS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Ends of the names of transformers' stacks of the matrices of experts."""
# fmt: off
CONVERTED_FAMILIES = {
    "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe",
    "qwen3_moe", "qwen3_next", "solar_open",
}
# fmt: on
"""Families in which peft takes target modules with `CONVERTED_MODULES` for experts, also in dense layers, and targets
stacks of experts in their place (peft 0.21, `utils.transformers_weight_conversion._convert_peft_config_moe`)."""
CONVERTED_MODULES = (".gate_proj", ".up_proj", ".down_proj")
MAGNITUDE_TOLERANCE = 1e-3
"""Relative difference between the norms of weights in bf16 and in fp32 that counts as none."""
REFUSED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
}
"""Fields of adapter_config.json with the values of adapters that Phalanx trains."""


@dataclass(frozen=True)
class MergedTensor:
    """A frozen matrix with its adapter, W + s B A, of which an index reads some rows, or a matrix of a stack."""

    weight: IndexedTensor
    a: IndexedTensor
    b: IndexedTensor
    scale: float
    magnitude: IndexedTensor | None = None
    """Norms of the rows; None: those that they have."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.weight.shape

    def __getitem__(self, index: Any, /) -> Tensor:
        """Return a range of rows, or everything (`...`)."""
        weight = self.weight[index]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a = self.a[index if len(self.shape) == 3 else ...]
        product = self.b[index].to(dtype) @ a.to(dtype)
        merged = weight.to(dtype) + self.scale * product
        if self.magnitude is None:
            return merged
        norms = torch.linalg.vector_norm(merged, dim=1).clamp_(min=torch.finfo(dtype).tiny)
        return merged * (self.magnitude[index].to(dtype) / norms)[:, None]


@dataclass(frozen=True)
class DequantizedTensor:
    """A quantized matrix in fp32, of which an index reads some rows, or a matrix of a stack."""

    packed: IndexedTensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return shape_of_numbers(self.packed.shape)

    def __getitem__(self, index: Any, /) -> Tensor:
        """Return a range of rows, or everything (`...`)."""
        return dequantize(self.packed[index], torch.float32)


def in_floating_point(spec: ModelSpec, tensors: Mapping[str, IndexedTensor]) -> dict[str, IndexedTensor]:
    """Return the tensors of a model without quantized ones."""
    parameters = model_parameters(spec)
    return {
        name: DequantizedTensor(tensor) if name in parameters and parameters[name].is_quantized else tensor
        for name, tensor in tensors.items()
    }


def merge_adapters(spec: ModelSpec, tensors: Mapping[str, IndexedTensor]) -> dict[str, IndexedTensor]:
    """Return the tensors of a model without adapters, whose matrices contain them."""
    tensors = in_floating_point(spec, tensors)
    merged = {name: tensor for name, tensor in tensors.items() if not is_adapter_parameter(name)}
    for name, (a, b, *magnitudes) in adapters_by_weight(spec).items():
        assert spec.tuning.adapter
        factors = tensors[a], tensors[b], spec.tuning.adapter.scale
        merged[name] = MergedTensor(tensors[name], *factors, *(tensors[each] for each in magnitudes))
    return merged


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the config.json of a language model, which may be a part of another one."""
    return text_config(read_json(hf_config_file(str(directory))))


def adapters_by_weight(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return the names of A, B and perhaps the magnitudes of each matrix that has an adapter, by its name."""
    names = model_parameters(spec)
    suffixes = (*ADAPTER_SUFFIXES, *([MAGNITUDE_SUFFIX] if spec.tuning.adapter and spec.tuning.adapter.dora else []))
    factors: dict[str, tuple[str, ...]] = {}
    for name in names:
        product = name.removesuffix(".weight")
        # Stacks of experts have no such end.
        factors[name] = tuple(name.replace(product, f"{product}{suffix}") for suffix in suffixes)
    return {name: each for name, each in factors.items() if each[0] in names}


# -- export ------------------------------------------------------------------------------------------------------------


def export_peft(
    spec: ModelSpec,
    tensors: Mapping[str, IndexedTensor],
    directory: str | Path,
    dtype: str = "fp32",
    source: Path | None = None,
) -> None:
    """Write the adapters of a model as a directory that peft loads.

    Args:
        tensors: Parameters by Phalanx's names.
        directory: New directory.
        dtype: "fp32" or "bf16".
        source: Directory with the config.json of the adapted model; by default that of an exported one.

    Raises:
        UserError: the directory exists and is not empty, no Hugging Face architecture has the model's shape, or peft
            has no form for the adapter.
        OSError: the files cannot be written.
    """
    adapter = spec.tuning.adapter
    assert adapter is not None
    tensors = in_floating_point(spec, tensors)
    directory = Path(directory).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("directory", str(directory), "exists and is not empty", fix="choose a new directory")
    config = read_config(source) if source else hf_config(spec.without_tuning)
    family = family_of(config)
    modules = _adapted_modules(family, spec)
    table = _adapter_config(adapter, modules, family.model_type, base=spec.from_hf or "")
    files: dict[str, FileTensor] = {}
    for module, (stored, names) in modules.items():
        factors = _stored_factors(stored, names, spec, tensors)
        for key, factor in zip(_stored_keys(adapter, module, modules), factors, strict=True):
            files[key] = FileTensor(TORCH_DTYPES[dtype], factor.shape, partial(iter, [factor]))
    saved = _saved_tensors(family, spec)
    shapes = parameter_shapes(spec.without_tuning)
    for hf_name, stored in saved.items():
        pieces = partial(stored_pieces, stored, tensors)
        files[f"{PREFIX}{hf_name}"] = FileTensor(TORCH_DTYPES[dtype], stored_shape(stored, shapes), pieces)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / WEIGHTS_FILE, files)
    table["modules_to_save"] = list(dict.fromkeys(name.rpartition(".")[0] for name in saved)) or None
    (directory / ADAPTER_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _adapted_modules(family: Family, spec: ModelSpec) -> dict[str, tuple[TensorSource, list[str]]]:
    """Return the Hugging Face modules with adapters: the source of their matrix, and its parameters with an adapter.

    Of experts, these are the stacks of matrices that transformers makes of a checkpoint's matrices."""
    adapted = adapters_by_weight(spec)
    modules: dict[str, tuple[TensorSource, list[str]]] = {}
    for hf_name, stored in hf_sources(family, spec.without_tuning).items():
        module = hf_name.removesuffix(".weight")
        if stored.expert is not None:
            module = re.sub(rf"\.{stored.expert}\.(gate|up)_proj$", ".gate_up_proj", module)
            module = module.replace(f".{stored.expert}.down_proj", ".down_proj")
            names = modules[module][0].names if module in modules else ()
            names = tuple(dict.fromkeys((*names, *stored.names)))
            stored = stored._replace(names=names, expert=None, rows=Rows(*names, stacked=True))
        names_with_adapter = [name for name in stored.names if name in adapted]
        if names_with_adapter or stored.rows.stacked:
            modules[module] = stored, names_with_adapter
    modules = {module: (stored, names) for module, (stored, names) in modules.items() if names}
    for module, (stored, _) in modules.items():
        is_known = module.endswith(EXPERT_STACKS) and stored.rows.transposed is False and not stored.rows.order
        if stored.rows.stacked and not is_known:
            assert spec.tuning.adapter
            problem = f"adapts experts, for which directories of peft for {family.model_type} are not known"
            fix = "use --to hf, which merges adapters"
            raise UserError("adapter.targets", list(spec.tuning.adapter.targets), problem, fix)
    return modules


def _saved_tensors(family: Family, spec: ModelSpec) -> dict[str, TensorSource]:
    """Return the Hugging Face tensors that are trained besides adapters, by name."""
    parameters = model_parameters(spec)
    trained = {name for name, each in parameters.items() if not each.is_frozen and not is_adapter_parameter(name)}
    sources = hf_sources(family, spec.without_tuning)
    saved = {hf_name: stored for hf_name, stored in sources.items() if trained.intersection(stored.names)}
    if any(stored.has_experts for stored in saved.values()) or (spec.tie_embeddings and "embedding.weight" in trained):
        problem = "trains experts, or a head that is the embedding, which a directory of peft cannot have"
        assert spec.tuning.adapter
        raise UserError("adapter.train", list(spec.tuning.adapter.train), problem, "use --to hf, which merges adapters")
    return saved


def _stored_factors(
    stored: TensorSource, names: Sequence[str], spec: ModelSpec, tensors: Mapping[str, IndexedTensor]
) -> tuple[Tensor, ...]:
    """Return A and B of a module, those of its products as blocks, and perhaps the magnitudes of its rows.

    A stack has the rows of A of each expert one after another, and in B the columns of all experts side by side."""
    adapted = adapters_by_weight(spec)
    a = torch.cat([tensors[adapted[name][0]][...] for name in names], dim=-2)
    blocks = [
        tensors[adapted[name][1]][...] if name in names else a.new_empty(*model_parameters(spec)[name].shape[:-1], 0)
        for name in stored.names
    ]
    if stored.rows.stacked:
        b = torch.stack([torch.block_diag(*of_expert) for of_expert in zip(*blocks, strict=True)])
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
    factors = a, stored.stored_rows(torch.block_diag(*blocks))
    if spec.tuning.adapter is None or not spec.tuning.adapter.dora:
        return factors
    magnitudes = [
        tensors[adapted[name][2]][...] if name in names else torch.linalg.vector_norm(tensors[name][...], dim=1)
        for name in stored.names
    ]
    return *factors, stored.stored_rows(torch.cat(magnitudes))


def _stored_keys(adapter: AdapterSpec, module: str, modules: Mapping[str, tuple[TensorSource, list[str]]]) -> list[str]:
    """Return the names of A, B and perhaps the magnitudes of a module in a file.

    Of two stacks in a module, peft wraps the second around the first."""
    first, second = EXPERT_STACKS
    if module.endswith(EXPERT_STACKS):
        is_inner = module.endswith(first) and module.removesuffix(first) + second in modules
        module = f"{module.rpartition('.')[0]}{'.base_layer' if is_inner else ''}"
    leaves = ["lora_A.weight", "lora_B.weight", *(["lora_magnitude_vector"] if adapter.dora else [])]
    return [f"{PREFIX}{module}.{leaf}" for leaf in leaves]


def _adapter_config(
    adapter: AdapterSpec, modules: Mapping[str, tuple[TensorSource, list[str]]], model_type: str, base: str
) -> dict[str, Any]:
    """Return the adapter_config.json of some modules.

    Raises UserError for magnitudes of a module that peft can only adapt as a parameter."""
    # Named by their parameters, matrices of dense layers remain what they are.
    as_parameters = [
        module
        for module, (stored, _) in modules.items()
        if not stored.rows.stacked and model_type in CONVERTED_FAMILIES and module.endswith(CONVERTED_MODULES)
    ]
    if as_parameters and adapter.dora:
        problem = f"cannot be combined with an adapter of {as_parameters[0]} in a directory for peft"
        raise UserError("adapter.dora", True, problem, "use --to hf, which merges adapters")
    stacks = [module for module, (stored, _) in modules.items() if stored.rows.stacked]
    counts = {module: len(names) for module, (_, names) in modules.items()}
    # Of a module with several blocks, the rank is a multiple, and the scale the same.
    ranks = {module: count * adapter.rank for module, count in counts.items() if count > 1}
    alphas = {module: adapter.scale * (math.sqrt(rank) if adapter.rslora else rank) for module, rank in ranks.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        # peft refuses parameters with dropout, which only training in peft would have.
        "lora_dropout": 0.0 if as_parameters else adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "bias": "none",
        "fan_in_fan_out": any(stored.rows.transposed for stored, _ in modules.values()),
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": [module for module in modules if module not in {*stacks, *as_parameters}],
        "target_parameters": [*(f"{module}.weight" for module in as_parameters), *stacks] or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


# -- import ------------------------------------------------------------------------------------------------------------


def open_peft_adapter(
    directory: str | Path, spec: ModelSpec, config: dict[str, Any] | None = None, base: Weights | None = None
) -> PartialWeights:
    """Return a function that reads the model's adapters, and what is trained with them, from a directory of peft.

    Args:
        directory: Directory with adapter_config.json and safetensors.
        spec: Model with adapters.
        config: The config.json of the adapted model; by default that of an exported one.
        base: Weights of the adapted model, which DoRA needs if a part of a module has no adapter.

    Raises:
        UserError: At once, if the adapters of the directory are not those of the model, or other than LoRA.
    """
    adapter = spec.tuning.adapter
    assert adapter is not None
    directory = Path(directory).expanduser()
    for name in (ADAPTER_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            fix = "use a directory that peft's save_pretrained has written, with safetensors"
            raise UserError(FIELD, str(directory), f"has no {name}", fix)
    table = read_json(directory / ADAPTER_FILE)
    for field, values in REFUSED.items():
        if table.get(field, values[0]) not in values:
            problem = f"has {field} = {table[field]!r} in {ADAPTER_FILE}, which is not supported"
            raise UserError(FIELD, str(directory), problem, "use a LoRA adapter without it")
    if bool(table.get("use_dora")) != adapter.dora:
        problem = f"is not what {FIELD} has"
        raise UserError("adapter.dora", adapter.dora, problem, f"set adapter.dora = {str(not adapter.dora).lower()}")
    for field in ("r", "lora_alpha"):
        if not isinstance(table.get(field), int | float):
            problem = f"has no number {field} in {ADAPTER_FILE}"
            raise UserError(FIELD, str(directory), problem, "use a directory that peft's save_pretrained has written")
    family = family_of(config or hf_config(spec.without_tuning))
    modules = _adapted_modules(family, spec)
    factors: dict[str, Tensor] = {}
    with _open_weights(directory / WEIGHTS_FILE) as file:
        unread = set(file.keys())
        for module, (stored, names) in modules.items():
            keys = _stored_keys(adapter, module, modules)
            if not unread.issuperset(keys):
                raise UserError(FIELD, str(directory), f"has no adapter of {module} ({names[0]})", TARGETS_FIX)
            unread -= set(keys)
            _check_scale(table, module, adapter)
            a, b, *magnitudes = map(file.get_tensor, keys)
            if stored.rows.stacked:
                factors |= _loaded_stacks(spec, stored, names, a, b, where=module)
                continue
            factors |= dict(_loaded_factors(spec, stored, names, a, b, where=module))
            factors |= dict(_loaded_magnitudes(spec, stored, names, *magnitudes, where=module, base=base))
        for hf_name, stored in _saved_tensors(family, spec).items():
            if f"{PREFIX}{hf_name}" in unread:
                unread.remove(f"{PREFIX}{hf_name}")
                factors |= _loaded_parameters(spec, stored, file.get_tensor(f"{PREFIX}{hf_name}"))
    if unread:
        fix = f"{TARGETS_FIX}, and adapter.train to what it trains besides"
        raise UserError(FIELD, sorted(unread)[0], "belongs to no adapter of the model", fix)

    def read_part(name: str, shape: torch.Size, part: Part) -> Tensor:
        factor = factors[name]
        if factor.shape != shape:
            raise UserError(FIELD, name, f"has shape {list(factor.shape)}, but the model requires {list(shape)}")
        return factor[part]

    return PartialWeights(read_part, factors)


def _open_weights(path: Path) -> Any:
    """Open a file of safetensors. Raises UserError if it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(FIELD, str(path), f"cannot be read: {error}", "copy the file again") from None


def _loaded_parameters(spec: ModelSpec, stored: TensorSource, tensor: Tensor) -> dict[str, Tensor]:
    """Return the parameters that a tensor of a checkpoint has."""
    shapes = [model_parameters(spec)[name].shape for name in stored.names]
    rows = [shape[0] for shape in shapes]
    whole = stored.with_axes(tensor, torch.Size((sum(rows), *shapes[0][1:])))
    return dict(zip(stored.names, stored.loaded_rows(whole, slice(0, sum(rows))).split(rows), strict=True))


def _check_scale(table: Mapping[str, Any], module: str, adapter: AdapterSpec) -> None:
    """Raise UserError if the adapter of a module has another factor than those of the model."""
    rank, alpha = (
        _of_pattern(table.get(pattern) or {}, module, table[default])
        for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    scale = alpha / (math.sqrt(rank) if table.get("use_rslora") else rank)
    if not math.isclose(scale, adapter.scale, rel_tol=1e-9):
        problem = f"gives adapters a factor of {adapter.scale:g}, but that of {module} has {scale:g}"
        fix = f"set adapter.rank = {table['r']} and adapter.alpha = {table['lora_alpha']:g}, as in {ADAPTER_FILE}"
        raise UserError("adapter.alpha", adapter.alpha, problem, fix)


def _of_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the number of a module: that of the name which its own ends with, or the default."""
    return next((number for end, number in pattern.items() if f".{module}".endswith(f".{end}")), default)


def _loaded_factors(
    spec: ModelSpec, stored: TensorSource, names: Sequence[str], a: Tensor, b: Tensor, where: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of the products of a module.

    All share its A, unless it has a block of rows of A for each, as an export has."""
    adapter = spec.tuning.adapter
    assert adapter is not None
    adapted = adapters_by_weight(spec)
    b = stored.loaded_rows(b, slice(0, len(b)))
    rows = dict(
        zip(stored.names, b.split([model_parameters(spec)[name].shape[-2] for name in stored.names]), strict=True)
    )
    has_blocks = len(names) > 1 and len(a) == len(names) * adapter.rank
    if len(a) != adapter.rank and not has_blocks:
        problem = f"is not the rank of {where}, which has {len(a)}"
        raise UserError("adapter.rank", adapter.rank, problem, f"set adapter.rank = {len(a)}")
    for index, name in enumerate(names):
        own = slice(index * adapter.rank, (index + 1) * adapter.rank) if has_blocks else slice(None)
        others = rows[name].clone()
        others[:, own] = 0
        if others.any():
            problem = f"has one A of rank {len(a)} for several products, which cannot be divided among them"
            raise UserError(FIELD, where, problem, f"set adapter.rank = {len(a)}, so that each has a copy")
        yield adapted[name][0], a[own]
        yield adapted[name][1], rows[name][:, own]
    for name in rows.keys() - set(names):
        if rows[name].any():
            problem = f"adapts {name} too, which adapter.targets leaves out"
            raise UserError(FIELD, where, problem, TARGETS_FIX)


def _loaded_magnitudes(
    spec: ModelSpec, stored: TensorSource, names: Sequence[str], *magnitudes: Tensor, where: str, base: Weights | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the magnitudes of the products of a module, if it has any.

    Those of a product without an adapter are the norms of its rows, as an export has them."""
    shapes = model_parameters(spec)
    for vector in magnitudes:
        rows = stored.loaded_rows(vector, slice(0, len(vector))).split([shapes[name].shape[0] for name in stored.names])
        for name, own in zip(stored.names, rows, strict=True):
            if name in names:
                yield adapters_by_weight(spec)[name][2], own
                continue
            norms = None if base is None else row_norms(spec, base, name, (slice(0, len(own)),))
            if norms is None or not torch.allclose(own.double(), norms, rtol=MAGNITUDE_TOLERANCE):
                problem = f"has magnitudes of {name} too, which adapter.targets leaves out"
                raise UserError(FIELD, where, problem, TARGETS_FIX)


def _loaded_stacks(
    spec: ModelSpec, stored: TensorSource, names: Sequence[str], a: Tensor, b: Tensor, where: str
) -> dict[str, Tensor]:
    """Return the stacks of A and B of the products of a stack of modules."""
    experts = model_parameters(spec)[stored.names[0]].shape[0]
    plain = stored._replace(rows=Rows(*stored.names))
    pairs = zip(a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).movedim(-1, 0), strict=True)
    of_experts = [dict(_loaded_factors(spec, plain, names, *pair, where=where)) for pair in pairs]
    return {name: torch.stack([factors[name] for factors in of_experts]) for name in of_experts[0]}
