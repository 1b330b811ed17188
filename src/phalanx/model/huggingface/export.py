"""Export of a model as a Hugging Face checkpoint: safetensors in shards, with an index."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.model.huggingface.checkpoint import INDEX_FILE, SINGLE_FILE, read_json
from phalanx.model.huggingface.safetensors_file import FileTensor, write_safetensors
from phalanx.model.huggingface.tensor_names import TensorSource, hf_sources, parameter_shapes
from phalanx.model.huggingface.tokenizer import hf_tokenizer_files, outdated_tokenizer_files
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config, merge_hf_config
from phalanx.spec.families.family import Family
from phalanx.spec.families.registry import family_of
from phalanx.spec.families.wrappers import wrapped_config
from phalanx.spec.formatting import plural
from phalanx.spec.model import ModelSpec

logger = logging.getLogger(__name__)

PRECISIONS = ("fp32", "bf16")
"""Precisions that can be exported."""
SHARD_BYTES = 5_000_000_000
PIECE_NUMBERS = 2**24
"""Maximum number of values of a matrix in memory."""
LICENSE_PREFIXES = ("LICENSE", "NOTICE")
GIVEN_FILES = ("config.json", "tokenizer.json")
"""Files of a source that an export replaces by those of the trained model."""


class IndexedTensor(Protocol):
    """A tensor, or a description of one in files, from which an index reads a part."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Return a row, a range of rows, or everything (`...`)."""


def check_precision(dtype: str) -> None:
    """Raise UserError if models cannot be exported in a precision."""
    if dtype not in PRECISIONS:
        raise UserError("dtype", dtype, "is not supported", fix=f"use one of {', '.join(PRECISIONS)}")


class CheckpointForm(NamedTuple):
    """A model as a Hugging Face checkpoint has it."""

    spec: ModelSpec
    """The model, without layers that the checkpoint cannot have."""
    config: dict[str, Any]
    """Its config.json, as far as the model determines it."""
    family: Family

    def tensors(self, tensors: Mapping[str, IndexedTensor], dtype: str) -> dict[str, FileTensor]:
        """Return the tensors of the checkpoint by name, whose numbers are read from full parameters when they are used.

        Raises UserError if the family has no such parameter, or one is missing."""
        shapes = parameter_shapes(self.spec)
        wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
        if wrong:
            raise UserError("weights", wrong[0], "is missing or has a wrong shape", fix="export a complete checkpoint")
        of_dtype = TORCH_DTYPES[dtype]
        constants = {
            name.replace("{i}", str(layer)): torch.tensor(number, dtype=of_dtype)
            for name, number in self.family.constant_tensors.items()
            for layer in range(self.spec.num_layers)
        }
        files = {
            name: FileTensor(of_dtype, number.shape, partial(iter, [number])) for name, number in constants.items()
        }
        for name, source in hf_sources(self.family, self.spec).items():
            own_dtype = torch.float32 if source.is_precise else of_dtype
            files[name] = FileTensor(own_dtype, stored_shape(source, shapes), partial(stored_pieces, source, tensors))
        return files


def checkpoint_form(spec: ModelSpec, source_config: dict[str, Any] | None = None) -> CheckpointForm:
    """Return the checkpoint of a model, with the other fields of the config.json of its initial model, if there is one.

    Layers for multi-token prediction are left out, with a warning, if checkpoints of the family cannot have them.
    Raises UserError if no Hugging Face architecture has the model's shape."""
    config = hf_config(spec) if source_config is None else merge_hf_config(spec, source_config)
    family = family_of(config)
    if spec.mtp and not family.has_mtp_layers(spec.mtp.layers):
        layers = plural(spec.mtp.layers, "layer")
        text = "checkpoints of type %s cannot have %s for multi-token prediction: the export leaves them out"
        logger.warning(text, family.model_type, layers)
        return checkpoint_form(spec.model_copy(update={"mtp": None}), source_config)
    return CheckpointForm(spec, config, family)


def export_hf(
    spec: ModelSpec,
    tensors: Mapping[str, IndexedTensor],
    directory: str | Path,
    tokenizer: str | Path | None = None,
    eos_id: int | None = None,
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
    source: Path | None = None,
) -> list[str]:
    """Write a directory for transformers' AutoModelForCausalLM and AutoTokenizer, complete or not at all.

    Layers for multi-token prediction are left out as by `checkpoint_form`.

    Args:
        tensors: Full parameters by Phalanx's names. They may be in files: a matrix, an expert, or the rows of a matrix
            that the checkpoint has in the same order, are read at a time.
        directory: Output directory.
        tokenizer: A tokenizer.json; None for that of `source`.
        eos_id: The id of its end-of-text token.
        dtype: "fp32" or "bf16".
        shard_bytes: The maximum size of one file of weights.
        source: A directory with the files of the initial model except its weights. They are copied, with the changes of
            `spec` in config.json. Of the files that `tokenizer` contradicts, only licenses are copied.

    Returns:
        The names of the files of `source` that are not copied, except tokenizer.json.

    Raises:
        UserError: the directory exists and is not empty, no Hugging Face architecture has the model's shape, or a
            parameter is missing.
        OSError: the files cannot be written.
    """
    directory = Path(directory).expanduser()
    check_precision(dtype)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("directory", str(directory), "exists and is not empty", fix="choose a new directory")
    form = checkpoint_form(spec, None if source is None else read_json(source / "config.json"))
    config = dict(form.config)
    dtype_fields = [field for field in ("torch_dtype", "dtype") if field in config]
    config |= dict.fromkeys(dtype_fields or ["torch_dtype"], str(TORCH_DTYPES[dtype]).removeprefix("torch."))
    source_files = {} if source is None else _list_files(source)
    config = wrapped_config(config)
    texts, kept_names = _settle_files(
        config, form.spec, tokenizer, eos_id=eos_id, source=source, source_files=source_files
    )
    files = form.tensors(tensors, dtype)
    partial_directory = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    partial_directory.mkdir(parents=True)
    try:
        _copy_files({name: source_files[name] for name in kept_names}, partial_directory)
        for name, text in texts.items():
            (partial_directory / name).write_text(text, encoding="utf-8")
        _write_tensors(files, partial_directory, shard_bytes)
        partial_directory.rename(directory)
    finally:
        shutil.rmtree(partial_directory, ignore_errors=True)
    return [name for name in source_files if name not in kept_names and name not in GIVEN_FILES]


def _list_files(folder: Path) -> dict[str, Path]:
    """Return all files below `folder`, by their names relative to it."""
    return {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _copy_files(files: Mapping[str, Path], directory: Path) -> None:
    for name, file in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, directory / name)


def _settle_files(
    config: Mapping[str, Any],
    spec: ModelSpec,
    tokenizer: str | Path | None,
    eos_id: int | None,
    source: Path | None,
    source_files: Mapping[str, Path],
) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the files to write, by name, and the names of the files of `source` to copy."""
    texts = {} if tokenizer is None else hf_tokenizer_files(Path(tokenizer), eos_id, spec.max_seq_len)
    outdated: set[str] | None = None
    if source is not None:
        outdated = set() if tokenizer is None else outdated_tokenizer_files(Path(tokenizer), source)
    if outdated is not None:
        texts = {name: text for name, text in texts.items() if name in outdated}
        return texts | {"config.json": _to_json(config)}, [name for name in source_files if name not in outdated]
    special = {} if eos_id is None else {"bos_token_id": eos_id, "eos_token_id": eos_id}
    if special:
        texts["generation_config.json"] = _to_json(special | {"pad_token_id": eos_id})
    licenses = [name for name, file in source_files.items() if file.name.startswith(LICENSE_PREFIXES)]
    return texts | {"config.json": _to_json({**config, **special})}, licenses


def _write_tensors(tensors: Mapping[str, FileTensor], directory: Path, shard_bytes: int) -> None:
    """Write one file, or several files with an index."""
    shards = shard_names({name: tensor.num_bytes for name, tensor in tensors.items()}, shard_bytes)
    files = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    files = [SINGLE_FILE] if len(shards) == 1 else files
    for file, names in zip(files, shards, strict=True):
        write_safetensors(directory / file, {name: tensors[name] for name in names})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total_size = sum(tensor.num_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(_to_json(index), encoding="utf-8")


def stored_shape(source: TensorSource, shapes: Mapping[str, torch.Size]) -> torch.Size:
    """Return the shape of a tensor in the checkpoint."""
    own_shapes = [shapes[name][int(source.has_experts) :] for name in source.names]
    stored = source.stored(torch.cat([torch.empty(shape, device="meta") for shape in own_shapes])).shape
    return torch.Size((shapes[source.names[0]][0], *stored)) if source.rows.stacked else stored


def stored_pieces(source: TensorSource, tensors: Mapping[str, IndexedTensor]) -> Iterator[Tensor]:
    """Yield the numbers of a tensor as the checkpoint has them: each expert, or a range of rows at a time."""
    parameters = [tensors[name] for name in source.names]
    if source.has_experts:
        experts = range(parameters[0].shape[0]) if source.rows.stacked else [source.expert]
        for expert in experts:
            yield source.stored(torch.cat([parameter[expert] for parameter in parameters]))
    elif source.rows.order or source.rows.transposed:
        yield source.stored(torch.cat([parameter[...] for parameter in parameters]))
    else:
        for parameter in parameters:
            num_rows = max(1, PIECE_NUMBERS // max(1, prod(parameter.shape[1:])))
            for first in range(0, parameter.shape[0], num_rows):
                yield parameter[first : first + num_rows]


def shard_names(sizes: Mapping[str, int], limit_bytes: int) -> list[list[str]]:
    """Return consecutive groups of names of at most `limit_bytes` each; a larger one is a group by itself."""
    shards: list[list[str]] = []
    free_bytes = 0
    for name, size in sizes.items():
        if size > free_bytes or not shards:
            shards.append([])
            free_bytes = limit_bytes
        shards[-1].append(name)
        free_bytes -= size
    return shards


def _to_json(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=2) + "\n"
