"""Base class of the mixers of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phalanx.spec.base import Spec
from phalanx.spec.parts.operations import Part, Value

if TYPE_CHECKING:
    from phalanx.spec.model import ModelSpec


class Mixer(Spec):
    """A mixer of tokens in place of attention."""

    attention_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of attention in a model, or in a kind of layers, that the mixer reads; the others have no effect on it."""

    attends: ClassVar[bool] = False
    """True if it is a form of attention, with a kernel of queries, keys and values."""

    @property
    def rotary_width(self) -> int:
        """Number of a head's channels that are rotated."""
        return 0

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a sequence up to which the mixer is computed exactly; None: any number."""
        return None

    def check(self, layer: ModelSpec) -> None:
        """Raise UserError if a layer (`spec.layers`) with these fields cannot have the mixer."""

    def describe(self, layer: ModelSpec, x: Value) -> Part:
        """Return the part of a layer on its normalized input."""
        raise NotImplementedError
