"""Small models with random parameters everywhere, so that a forgotten norm or bias changes the result."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.model.huggingface.checkpoint import open_hf_weights
from phalanx.model.init import Weights
from phalanx.model.transformer import Transformer
from phalanx.parallel.init_parameters import init_buffers, init_parameters
from phalanx.parallel.module_tensors import materialize
from phalanx.parallel.strategy import Strategy
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.model import ModelSpec

ModelBuilder = Callable[..., Transformer]
SMALL_MODEL = {
    "vocab_size": 53,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 48,
    "max_seq_len": 64,
}


def random_weight(name: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return 1 + 0.3 * noise if "norm" in name and name.endswith("weight") else noise / shape[-1] ** 0.5


def build_model(spec: ModelSpec | None = None, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """Return a model from its spec, or from changes of SMALL_MODEL; in fp64 by default."""
    with torch.device("meta"):
        model = Transformer(spec or ModelSpec(**SMALL_MODEL | changes)).to(dtype)
    return fill(model, random_weight)


def load_model(directory: Path, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """Return the model of a Hugging Face directory, with changes of its spec."""
    spec = load_model_spec(str(directory)).replace(**changes)
    with torch.device("meta"):
        model = Transformer(spec).to(dtype)
    return fill(model, open_hf_weights(directory, spec))


def fill(model: Transformer, weights: Weights) -> Transformer:
    """Return a model of meta tensors with weights and the biases of its routers."""
    materialize(model, torch.device("cpu"))
    init_parameters(Strategy(model), weights)
    init_buffers(Strategy(model), weights)
    return model
