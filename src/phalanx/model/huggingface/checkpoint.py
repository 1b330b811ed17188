"""Hugging Face checkpoints, read one parameter at a time.

Safetensors and JSON only; transformers itself is not needed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.model.huggingface.quantized import find_encoding, stored_weights
from phalanx.model.huggingface.tensor_names import ROUTER_BIAS, hf_sources, parameter_shapes
from phalanx.model.init import Part, PartialWeights
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import PREDICTION_LAYERS, require_known_fields
from phalanx.spec.families.family import Family
from phalanx.spec.families.registry import family_of
from phalanx.spec.families.wrappers import OTHER_TENSORS, PREFIXES, text_config
from phalanx.spec.files.load import hf_config_file
from phalanx.spec.files.tables import parse_json
from phalanx.spec.model import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"
HEAD = "lm_head.weight"
KEYS_AND_VALUES = ("attention.wk.", "attention.wv.", "attention.k_norm.")
"""Parameters of attention that layers do not have if they read the keys and values of others."""

FIELD = "model.from_hf"
SHAPE_FIX = "use a complete causal language model, and the model shape of its config.json"
MTP_FIX = "remove model.mtp, or use a checkpoint with layers for multi-token prediction"
DOWNLOAD_FIX = "download it again"
DIRECTORY_FIX = "use a directory that save_pretrained has written"


def open_hf_weights(directory: str | Path, spec: ModelSpec) -> PartialWeights:
    """Return a function that reads a parameter of `spec`, or a part of it, from a `save_pretrained` directory.

    It returns a tensor on the CPU in the checkpoint's dtype. Files are mapped into memory, so only the part is read,
    and copied where experts are stacked or rows have another order. MXFP4 is decoded to bf16 and float8 to fp32, a
    matrix at a time.

    Args:
        directory: The checkpoint's directory, or the config.json in it.
        spec: The model to initialize with these weights.

    Raises:
        UserError: At once, if there are no safetensors of a known model type, or if a tensor is missing or not one of
            the model's. At once also if an unknown field of config.json may change the model's computation. When the
            function is called, if the tensor has another shape.
    """
    config_file = hf_config_file(str(directory))
    directory = config_file.parent
    whole_config = read_json(config_file)
    config = text_config(whole_config)
    family = family_of(config)
    encoding = find_encoding(whole_config) or find_encoding(config)
    require_known_fields(config)
    files = tensor_files(directory)
    weights = stored_weights(encoding, files)
    shapes = parameter_shapes(spec)
    sources = hf_sources(family.stored_in(files), spec)
    hf_names = defaultdict(list)
    for hf_name, source in sources.items():
        for name in source.names:
            hf_names[name].append(hf_name)
    num_layers = int(config.get("num_hidden_layers", spec.num_layers))
    num_predicting = max([1, *(int(config.get(field) or 0) for field in PREDICTION_LAYERS)])
    # Files may have keys and values of layers that read others, as transformers allows.
    unused = (
        "*" + hf_name.removeprefix(family.prefix).replace("{i}", str(layer))
        for hf_name, rows in family.stored_rows
        for layer in spec.kv_sources
        if any(name.startswith(KEYS_AND_VALUES) for name in rows.names)
    )
    family = replace(family, ignored_tensors=(*family.ignored_tensors, *unused))
    stored_names = _stored_names(
        family,
        {hf_name: source.rows.alias for hf_name, source in sources.items()},
        weights,
        range(num_layers, num_layers + num_predicting),
        tied=spec.tie_embeddings,
        is_wrapped=whole_config["model_type"] != config["model_type"],
        directory=directory,
    )
    constants = {
        name: number
        for hf_name, number in family.constant_tensors.items()
        for name in weights
        if fnmatchcase(name, _any_layer(family, hf_name))
    }
    opened = cache(_open_safetensors)

    def read_part(name: str, shape: torch.Size, part: Part) -> Tensor:
        if name not in hf_names:
            # A run may give the router a bias that the model has not.
            if name.endswith(ROUTER_BIAS):
                return torch.zeros(shape)[part]
            raise UserError(FIELD, name, "is not in the checkpoint", fix=SHAPE_FIX)
        first, *_ = hf_names[name]
        if not sources[first].has_experts:
            return read_matrix(name, first, shape, part)
        experts = range(shape[0])[part[0]]
        if sources[first].rows.stacked:
            matrices = [read_matrix(name, first, shape[1:], part[1:], expert) for expert in experts]
        else:
            matrices = [read_matrix(name, hf_names[name][expert], shape[1:], part[1:]) for expert in experts]
        # A rank may have no expert, and the others have the dtype of the files.
        return torch.stack(matrices) if matrices else torch.empty(0, *shape[1:])[:, *part[1:]]

    def read_matrix(name: str, hf_name: str, shape: torch.Size, part: Part, expert: int | None = None) -> Tensor:
        """Return a part of a parameter, or of that of an expert, from the tensor that has it, or a stack of them."""
        source = sources[hf_name]
        num_rows = [shapes[other][int(source.has_experts)] for other in source.names]
        first_row = sum(num_rows[: source.names.index(name)])
        joined_shape = torch.Size((sum(num_rows), *shape[1:]))
        stored = read_tensor(stored_names[hf_name], expert)
        if source.rows.joined and len(stored) != shape[0]:
            stored = read_joined(name, source.rows.joined)
        tensor = _check_shape(source.with_axes(stored, joined_shape), hf_name, joined_shape)
        rows = slice(first_row + part[0].start, first_row + part[0].stop)
        return source.loaded_rows(tensor, rows)[:, *part[1:]]

    def read_joined(name: str, joined: tuple[str, ...]) -> Tensor:
        """Return the rows of a parameter of those of `joined`, which the files have in parts that end elsewhere."""
        module, _, leaf = name.rpartition(".")
        names = [f"{module}.{other}" for other in joined]
        tensors = [read_tensor(stored_names[hf_name]) for other in names for hf_name in hf_names[other]]
        first_row = sum(shapes[other][0] for other in names[: joined.index(leaf)])
        return torch.cat(tensors)[first_row:][: shapes[name][0]]

    def read_tensor(name: str, expert: int | None = None) -> Tensor:
        tensors = [_read_tensor(opened(files[part]), part, expert) for part in weights[name]]
        return _require_plain(tensors[0], name) if encoding is None or len(tensors) == 1 else encoding.decode(*tensors)

    for name, number in constants.items():
        # Files in bf16 have rounded numbers.
        if read_tensor(name).to(torch.bfloat16) != torch.tensor(number).to(torch.bfloat16):
            problem = f"is not {number}, as in the formula of the model"
            raise UserError(FIELD, name, problem, "use a model of the published family")
    if spec.tie_embeddings and HEAD in weights:
        [embedding] = hf_names["embedding.weight"]
        if not torch.equal(read_tensor(HEAD), read_tensor(stored_names[embedding])):
            problem = f"differs from {embedding}, although config.json ties the two; transformers keeps both"
            raise UserError(FIELD, HEAD, problem, fix="set model.tie_embeddings = false")
    return PartialWeights(read_part)


def _stored_names(
    family: Family,
    aliases: Mapping[str, str],
    weights: Collection[str],
    prediction_layers: range,
    tied: bool,
    is_wrapped: bool,
    directory: Path,
) -> dict[str, str]:
    """Return the name in the files of each tensor of the model, by its Hugging Face name.

    `aliases` are other names of these tensors in their layers, or empty.

    Raises UserError for a missing tensor, and for a tensor in the files that the model does not have."""
    names: dict[str, str] = {}
    for hf_name, alias in aliases.items():
        # A model saved without its head has names without the prefix, a multimodal one with another prefix.
        inner_name = hf_name.removeprefix(family.prefix)
        alternatives = [hf_name, inner_name, *(f"{prefix}{inner_name}" for prefix in PREFIXES)]
        if alias:
            alternatives += [re.sub(r"(\.\d+\.).*", rf"\g<1>{alias}", name) for name in alternatives]
        # transformers 5.24 saves Kimi K2.5 so.
        alternatives += [name.replace(".layers.", ".blocks.") for name in alternatives if is_wrapped]
        name = next((name for name in alternatives if name in weights), None)
        if name is None:
            endings = tuple(name.rpartition("{i}")[2] for name in (family.mtp.tensors if family.mtp else ()))
            is_of_mtp = hf_name.endswith(endings)
            raise UserError(FIELD, str(directory), f"has no tensor {hf_name}", MTP_FIX if is_of_mtp else SHAPE_FIX)
        names[hf_name] = name
    other = sorted(set(weights) - set(names.values()) - ({HEAD} if tied else set()))
    constants = (_any_layer(family, name) for name in family.constant_tensors)
    patterns = (*constants, *family.ignored_tensors, *(OTHER_TENSORS if is_wrapped else ()))
    ignored = {pattern.replace("{L}", str(layer)) for pattern in patterns for layer in prediction_layers}
    unread = [name for name in other if not any(fnmatchcase(name, pattern) for pattern in ignored)]
    if unread:
        more = f", nor are {len(unread) - 1} more tensors" if len(unread) > 1 else ""
        note = " (transformers drops it too, as config.json has no bias)" * unread[0].endswith(".bias")
        raise UserError(FIELD, unread[0], f"is not used by the model{note}{more}", fix=SHAPE_FIX)
    return names


def _any_layer(family: Family, hf_name: str) -> str:
    """Return the pattern of the name of a tensor in all layers, also in a model saved without its head."""
    return "*" + hf_name.removeprefix(family.prefix).replace("{i}", "*")


def _read_tensor(file: Any, name: str, expert: int | None) -> Tensor:
    """Return a tensor, or of a stack that of an expert."""
    try:
        tensor: Tensor = file.get_tensor(name) if expert is None else file.get_slice(name)[expert]
    except SafetensorError as error:
        raise UserError(FIELD, name, f"cannot be read: {error}", fix=DOWNLOAD_FIX) from None
    return tensor


def _require_plain(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor that is not quantized."""
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise UserError(FIELD, name, f"is quantized ({tensor.dtype})", fix="use the checkpoint in bf16 or fp32")
    return tensor


def _check_shape(tensor: Tensor, hf_name: str, shape: torch.Size) -> Tensor:
    if tensor.shape != shape:
        problem = f"has shape {list(tensor.shape)}, but the model requires {list(shape)}"
        raise UserError(FIELD, hf_name, problem, fix=SHAPE_FIX)
    return tensor


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor, by its name in the checkpoint.

    A single file has priority over an index, as in transformers. Raises UserError if weights are missing."""
    if (directory / ADAPTER_FILE).is_file():
        problem = f"contains an adapter ({ADAPTER_FILE}) for the weights of another model"
        raise UserError(
            FIELD,
            str(directory),
            problem,
            fix="merge the adapter into its model: merge_and_unload(), save_pretrained()",
        )
    single_file = directory / SINGLE_FILE
    if single_file.is_file():
        return dict.fromkeys(_open_safetensors(single_file).keys(), single_file)
    if (directory / INDEX_FILE).is_file():
        files = {tensor: directory / file for tensor, file in files_of_index(directory / INDEX_FILE).items()}
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise UserError(
                FIELD, str(directory), f"does not contain {', '.join(missing)}", fix="download the full checkpoint"
            )
        return files
    if any(directory.glob("*.bin")):
        raise pickled_weights_error(str(directory))
    raise UserError(FIELD, str(directory), f"has no {SINGLE_FILE}", fix=DIRECTORY_FIX)


def files_of_index(index: Path) -> dict[str, str]:
    """Return the name of the file of each tensor in an index of files.

    It is only a name: an untrusted index must not refer to files outside its directory."""
    weight_map = read_json(index).get("weight_map", {})
    return {tensor: Path(str(file)).name for tensor, file in weight_map.items()}


def pickled_weights_error(source: str) -> UserError:
    """Return the error for a model without safetensors."""
    problem = "has only pickled .bin weights, which may run code when they are loaded"
    return UserError(FIELD, source, problem, fix="convert it to safetensors")


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(FIELD, str(file), f"cannot be read: {error}", fix=DOWNLOAD_FIX) from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file of a Hugging Face directory.

    Raises:
        UserError: the file is missing or not a JSON object.
    """
    try:
        return dict(parse_json(file.read_bytes()))
    except OSError:
        raise UserError(FIELD, str(file), "does not exist", fix=DIRECTORY_FIX) from None
    except (ValueError, TypeError) as error:
        raise UserError(FIELD, str(file), f"is not valid JSON: {error}", fix=DOWNLOAD_FIX) from None
