"""Hugging Face checkpoints: read one parameter at a time, and written so that transformers loads them.

Safetensors and JSON only; transformers itself is not needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.model.huggingface.tensor_names import FAMILIES, hf_location
from phalanx.spec.errors import UserError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

FIELD = "model.from_hf"
SHAPE_FIX = "give a whole causal language model, and leave the model's shape as its config.json has it"
DOWNLOAD_FIX = "download it again"
DIRECTORY_FIX = "give a directory that save_pretrained wrote"


def open_hf_weights(directory: str | Path) -> Callable[[str, torch.Size], Tensor]:
    """A function that reads one parameter, by our name, from what `save_pretrained` wrote into `directory`.

    It gives the full tensor on the CPU in the checkpoint's dtype, and holds no more than that in memory.
    Raises UserError at once if there are no safetensors of a known model type, and when it is called if the
    tensor is missing or has another shape.
    """
    directory = Path(directory).expanduser()
    directory = directory.parent if directory.suffix == ".json" else directory
    config = _read_json(directory / "config.json")
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise UserError("config.json model_type", kind, "is not supported", f"known: {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise UserError(FIELD, str(directory), "holds quantized weights", "give the checkpoint in bf16 or fp32")
    files = _tensor_files(directory)
    opened = cache(_open_safetensors)

    def read_weight(name: str, shape: torch.Size) -> Tensor:
        location = hf_location(kind, name)
        if "{e}" in location.name:
            names = [location.name.replace("{e}", str(expert)) for expert in range(shape[0])]
            return torch.stack([_check_shape(read_tensor(hf_name), hf_name, shape[1:]) for hf_name in names])
        tensor = read_tensor(location.name)
        tensor = tensor.T if location.transposed else tensor
        rows = tensor.shape[0] // location.parts
        return _check_shape(tensor[location.part * rows : (location.part + 1) * rows], location.name, shape)

    def read_tensor(hf_name: str) -> Tensor:
        # A model saved without its head has no "model." or "transformer." before its names.
        stored_name = next(
            (candidate for candidate in (hf_name, hf_name.partition(".")[2]) if candidate in files), None
        )
        if stored_name is None:
            raise UserError(FIELD, str(directory), f"has no tensor {hf_name}", SHAPE_FIX)
        try:
            return opened(files[stored_name]).get_tensor(stored_name)
        except SafetensorError as error:
            raise UserError(FIELD, str(files[stored_name]), f"gives no {stored_name}: {error}", DOWNLOAD_FIX) from None

    return read_weight


def _check_shape(tensor: Tensor, hf_name: str, shape: torch.Size) -> Tensor:
    if tensor.shape != shape:
        problem = f"has shape {list(tensor.shape)} where the model has {list(shape)}"
        raise UserError(FIELD, hf_name, problem, SHAPE_FIX)
    return tensor


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor, by its Hugging Face name."""
    if (directory / INDEX_FILE).is_file():
        weight_map = _read_json(directory / INDEX_FILE).get("weight_map", {})
        # Only the last part: an index from outside must not point out of its directory.
        files = {tensor: directory / Path(str(file)).name for tensor, file in weight_map.items()}
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise UserError(FIELD, str(directory), f"lacks {', '.join(missing)}", "download the whole checkpoint")
        return files
    single_file = directory / SINGLE_FILE
    if single_file.is_file():
        return dict.fromkeys(_open_safetensors(single_file).keys(), single_file)
    if any(directory.glob("*.bin")):
        problem = "has its weights as pickled .bin only, which may run code when they are read"
        raise UserError(FIELD, str(directory), problem, "save it again as safetensors")
    raise UserError(FIELD, str(directory), f"has no {SINGLE_FILE}", DIRECTORY_FIX)


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(FIELD, str(file), f"cannot be read: {error}", DOWNLOAD_FIX) from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except OSError:
        raise UserError(FIELD, str(file), "no such file", DIRECTORY_FIX) from None
    except (ValueError, TypeError) as error:
        raise UserError(FIELD, str(file), f"is not valid JSON: {error}", DOWNLOAD_FIX) from None
