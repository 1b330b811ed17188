"""Training of a part of a model: frozen parameters, and adapters of frozen products."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field

from phalanx.spec.base import LocalPath, Spec, did_you_mean, require
from phalanx.spec.errors import UserError
from phalanx.spec.parts.operations import NF4_BLOCK, Parameter

ADAPTER_SUFFIXES = ("_lora_A", "_lora_B")
"""Ends of the names of an adapter's products, after that of the product that it adapts."""
MAGNITUDE_SUFFIX = "_lora_magnitude"
"""End of the name of the magnitudes of an adapted product's rows."""


class AdapterSpec(Spec):
    """Low-rank adapters of frozen products (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B A x."""

    rank: int = Field(gt=0, examples=[16])
    """Rows of A and columns of B."""
    alpha: float = Field(gt=0, examples=[32.0])
    """Factor of an adapter's output, times the rank."""
    targets: Literal["linear"] | tuple[str, ...] = Field("linear", examples=[["wq", "wv", "mlp.down"]])
    """Products of blocks that have an adapter, by the ends of their names, such as "experts.down"; "linear": all but
    those of routers, and of routed experts, which are no linear layers."""
    rslora: bool = False
    """Divide alpha by the square root of the rank (rsLoRA, arXiv 2312.03732)."""
    dora: bool = False
    """Train the norm of each row of an adapted matrix apart from its direction (DoRA, arXiv 2402.09353)."""
    dropout: float = Field(0.0, ge=0, lt=1, examples=[0.05])
    """Share of the inputs of A that training sets to zero, drawn for each token and step (LoRA's released code)."""
    base_dtype: Literal["nf4"] | None = Field(None, examples=["nf4"])
    """"nf4": keep the frozen matrices of blocks in 4 bits (QLoRA, arXiv 2305.14314); by default in the precision of the
    other parameters."""

    train: tuple[str, ...] = Field((), strict=False, examples=[["head.*", "*norm.weight"]])
    """Parameters of the model that are trained too, with wildcards as in `training.freeze` (`modules_to_save`)."""
    from_peft: LocalPath | None = Field(None, examples=["path/to/adapter"])
    """Directory of peft with the initial adapters, in safetensors; by default A is random and B zero."""

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def is_target(self, name: str) -> bool:
        """Return whether `targets` names the product of a block, such as "attention.wq"."""
        return any(f".{name}".endswith(f".{target}") for target in self.targets)


class TuningSpec(Spec):
    """The part of a model that is trained, which a run sets from its own fields (`spec.run`)."""

    freeze: tuple[str, ...] = Field((), strict=False)
    """Glob patterns of the names of frozen parameters."""
    adapter: AdapterSpec | None = None
    """Adapters; all other parameters are then frozen."""

    def freezes(self, name: str) -> bool:
        """Return whether a parameter of the model is not trained."""
        is_base = self.adapter is not None and not is_adapter_parameter(name)
        trains_too = self.adapter is not None and _matches(name, self.adapter.train)
        return (is_base and not trains_too) or _matches(name, self.freeze)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_adapter_parameter(name: str) -> bool:
    """Return whether a parameter is one of an adapter's."""
    return name.removesuffix(".weight").endswith((*ADAPTER_SUFFIXES, MAGNITUDE_SUFFIX))


def check_freeze(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError for a pattern without a parameter, or if no parameter is left."""
    check_patterns("training.freeze", patterns, names)
    if all(_matches(name, patterns) for name in names):
        problem = "matches all parameters, so that nothing is left to train"
        raise UserError("training.freeze", list(patterns), problem, "remove some of the patterns")


def check_patterns(field: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError for a pattern that matches none of the names."""
    for index, pattern in enumerate(patterns):
        if not any(fnmatchcase(name, pattern) for name in names):
            fallback = f"use patterns of names such as {', '.join(names[:3])}"
            similar = did_you_mean(pattern, list(names), fallback)
            raise UserError(f"{field}[{index}]", pattern, "matches no parameter of the model", similar)


def check_base_dtype(adapter: AdapterSpec, parameters: Mapping[str, Parameter]) -> None:
    """Raise UserError if a matrix that would be quantized is trained, or its rows are no blocks."""
    for name, parameter in parameters.items():
        if not parameter.is_quantized:
            continue
        problem = f"has no effect on {name}, which adapter.train contains"
        fix = "remove the pattern from adapter.train, or adapter.base_dtype"
        require(parameter.is_frozen, "adapter.base_dtype", adapter.base_dtype, problem, fix)
        columns = parameter.shape[-1]
        problem = f"has blocks of {NF4_BLOCK} numbers, but the rows of {name} have {columns}"
        fix = f"use a model whose widths are multiples of {NF4_BLOCK}, or remove adapter.base_dtype"
        require(columns % NF4_BLOCK == 0, "adapter.base_dtype", adapter.base_dtype, problem, fix)


def check_adapter(adapter: AdapterSpec, products: Sequence[str], of_experts: Collection[str]) -> None:
    """Raise UserError for a target that is none of the products of blocks, or for experts with more than A and B."""
    more = {name: value for name in ("dora", "dropout") if (value := getattr(adapter, name))}
    for name in of_experts if more and adapter.targets != "linear" else ():
        if adapter.is_target(name):
            field, value = next(iter(more.items()))
            problem = f"has no effect on routed experts, and adapter.targets contains {name}"
            raise UserError(f"adapter.{field}", value, problem, f"remove adapter.{field}, or the experts")
    for index, target in enumerate(() if adapter.targets == "linear" else adapter.targets):
        if not any(f".{name}".endswith(f".{target}") for name in products):
            problem = "names none of the products of the model's blocks"
            leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in products))
            raise UserError(f"adapter.targets[{index}]", target, problem, did_you_mean(target, leaves))
    if not adapter.targets:
        raise UserError("adapter.targets", [], "is empty", 'name products, or use "linear"')
