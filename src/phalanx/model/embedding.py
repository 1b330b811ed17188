"""Tables of vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """A table, of which ranks may have some rows."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def forward(self, indices: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the rows of indices, of this table if no other is given."""
        return self.look_up(indices, self.weight if weight is None else weight)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return a tensor times a factor, which is rounded to the tensor's precision."""
    return x * torch.tensor(factor, dtype=x.dtype).item()
