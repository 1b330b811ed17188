"""Sources of training data that are mixed by weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from pydantic import Field, field_validator

from phalanx.spec.base import Spec, TextSource, require

MAX_DENOMINATOR = 1_000_000
"""Largest common denominator of shares. After this number of sequences the order of sources repeats. To compute it
takes a second and 18 MB."""


RecordKind = Literal["text", "chat", "prompt", "preference"]
"""Format of the records of a source."""
TooLong = Literal["error", "drop", "truncate"]
"""Treatment of conversations that are longer than a sequence."""


class SourceSpec(Spec):
    """A source of a mixture of training data."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", examples=["code"])
    """Name of the source in messages and errors."""
    path: list[TextSource] = Field(examples=["texts/code"])
    """Its text or tokens, in the format of `data.train`."""
    weight: float = Field(ge=0, examples=[0.7])
    """Its share of the tokens is this weight divided by the sum of all weights. A sequence has one source. With 0
    it is not read, except in phases with another weight."""
    epochs: float | None = Field(None, gt=0, examples=[4])
    """How often its text may be used in the run. A run that needs it more often does not start."""
    config: str | None = Field(None, examples=["en"])
    """Configuration of its Hugging Face datasets, as in `hf:NAME:CONFIG:SPLIT`."""
    split: str | None = Field(None, examples=["train"])
    """Split of its Hugging Face datasets; by default "train"."""
    format: RecordKind | None = Field(None, examples=["chat"])
    """Format of its records, if other than `data.format`."""
    text_key: str | None = Field(None, examples=["content"])
    """Field with the text or messages in its records, if other than `data.text_key`."""
    too_long: TooLong | None = Field(None, examples=["drop"])
    """Treatment of its conversations that are longer than a sequence, if other than `data.too_long`."""
    max_bad_records: int | None = Field(None, ge=0, examples=[100])
    """Broken records that are skipped and listed, if other than `data.max_bad_records`."""

    @field_validator("path", mode="before")
    @classmethod
    def _accept_one_path(cls, value: object) -> object:
        require(bool(value), "", value, "is empty", "use a file, a directory or a glob, or remove this source")
        return [value] if isinstance(value, str) else value


def shares_of_weights(weights: Sequence[float]) -> list[Fraction]:
    """Return the exact shares of weights, each of which is the decimal number that its user wrote."""
    exact_weights = [Fraction(str(weight)) for weight in weights]
    total = sum(exact_weights)
    return [weight / total for weight in exact_weights]


def common_denominator(shares: Sequence[Fraction]) -> int:
    """Return the smallest number of sequences that can be divided by shares exactly."""
    return math.lcm(*(share.denominator for share in shares))


def check_mixture(sources: Sequence[SourceSpec]) -> None:
    """Raise UserError if two sources have one name, or weights have too many digits."""
    names = [source.name for source in sources]
    for number, name in enumerate(names):
        problem = "is the name of two sources"
        require(name not in names[:number], f"source[{number}].name", name, problem, "give each its own name")
    weights = [source.weight for source in sources]
    if not sources:
        return
    require(any(weights), "source[0].weight", weights[0], "is 0, as that of every source", "give one of them a weight")
    denominator = common_denominator(shares_of_weights(weights))
    problem = f"have shares with the common denominator {denominator:,}, but at most {MAX_DENOMINATOR:,} is supported"
    total = sum(weights)
    rounded_weights = [max(round(weight / total, 4), 0.0001) if weight else 0 for weight in weights]
    fix = f"round the weights: {', '.join(f'{weight:g}' for weight in rounded_weights)}"
    require(denominator <= MAX_DENOMINATOR, "source", weights, problem, fix)
