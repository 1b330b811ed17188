"""Logits and next tokens of a transformer that ranks share.

Ranks of a pipeline and of tensor parallelism make the same calls with the same tokens. Each keeps what its own blocks
and heads need of earlier tokens. Of a new token, one position passes through the stages; the last one chooses the next
token, and sends it to the others. A position cannot be divided, so sequence parallelism is off."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.generation import Choose, Predictor, head_of_last
from phalanx.model.transformer import HeadFunction, Transformer
from phalanx.parallel.strategy import Strategy
from phalanx.parallel.tensor.tensor_parallel import TensorParallelGroup


class SharedModel(Predictor):
    """The transformer of a strategy, on each of its ranks."""

    def __init__(self, strategy: Strategy, agreeing: dist.ProcessGroup | None = None) -> None:
        """Prepare a strategy's model.

        `agreeing` are ranks that must choose equal tokens to end together: replicas share weights or experts in each
        pass, and may round differently."""
        super().__init__(strategy.module)
        self.agreeing = agreeing
        self.has_cache = strategy.holds_in_all_stages(self.has_cache)
        self.strategy = strategy
        self.spec = cast(Transformer, strategy.module).spec
        self.tp = cast(TensorParallelGroup | None, strategy.model_parallel.tensor_parallel)

    def next_tokens(self, tokens_BT: Tensor, last_B: Tensor, choose: Choose) -> Tensor:
        """Return what is chosen by the logits after token `last_B` of each row, of which later ones are padding."""
        assert self.transformer is not None
        logits_BV = self._run_head(tokens_BT, head_of_last(self.transformer, last_B))
        tokens_B = self.strategy.send_from_head(torch.empty_like(last_B) if logits_BV is None else choose(logits_BV))
        if self.agreeing is not None:
            tokens_B = tokens_B.contiguous()
            dist.broadcast(tokens_B, group=self.agreeing, group_src=0)
        return tokens_B

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of all tokens, [B, T, V], on every rank."""
        logits_BTV = self._run_head(tokens_BT, None)
        if logits_BTV is None:
            like = next(self.strategy.module.parameters())
            logits_BTV = like.new_empty(*tokens_BT.shape, self.spec.vocab_size)
        return self.strategy.send_from_head(at_least_fp32(logits_BTV))

    @torch.no_grad()
    def _run_head(self, tokens_BT: Tensor, head: HeadFunction | None) -> Tensor | None:
        """Return the result of the head for all ids; None on ranks without it."""
        with self.tp.whole_rows() if self.tp else nullcontext():
            local = self.strategy.run_head(tokens_BT, head)
        if local is None or self.tp is None:
            return local
        # The last rank may have fewer ids.
        width = -(-self.spec.vocab_size // self.tp.size)
        padded = F.pad(local, (0, width - local.shape[-1]))
        return self.tp.start_all_gather(padded, axis=local.ndim - 1)()[..., : self.spec.vocab_size]
