"""Weights of `model.from_hf` on the Hugging Face hub, in the local cache."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from phalanx.model.huggingface.checkpoint import (
    FIELD,
    INDEX_FILE,
    SINGLE_FILE,
    files_of_index,
    pickled_weights_error,
    tensor_files,
)
from phalanx.spec.errors import UserError
from phalanx.spec.files.hub import CONFIG_FILE, download_files, hub_file, hub_file_names, hub_name


def local_weights(from_hf: str) -> Path:
    """Return the local path of `model.from_hf`. Of a model on the hub, download what the local cache lacks.

    Raises UserError if the hub has no safetensors of the model, or cannot be reached."""
    name = hub_name(from_hf)
    if name is None:
        return Path(from_hf).expanduser()
    cached = hub_file(FIELD, name, CONFIG_FILE).parent
    with suppress(UserError):
        tensor_files(cached)
        return cached
    names = hub_file_names(FIELD, name)
    if SINGLE_FILE in names:
        return download_files(FIELD, name, [SINGLE_FILE])
    if INDEX_FILE in names:
        files = {*files_of_index(hub_file(FIELD, name, INDEX_FILE)).values()}
        safetensors = [file for file in names if file in files and file.endswith(".safetensors")]
        return download_files(FIELD, name, [INDEX_FILE, *safetensors])
    if any(file.endswith(".bin") for file in names):
        raise pickled_weights_error(from_hf)
    raise UserError(FIELD, from_hf, f"has no {SINGLE_FILE} on the hub", fix="name a model with safetensors")
