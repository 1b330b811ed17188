"""Next tokens and scores of given ones by a transformer that ranks share.

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
from phalanx.model.generation import Choose, Places, Predictor, head_of_last, head_of_targets
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
        logits_BV = self._gather_ids(self._run_head(tokens_BT, head_of_last(self.transformer, last_B)))
        tokens_B = self.strategy.send_from_head(torch.empty_like(last_B) if logits_BV is None else choose(logits_BV))
        if self.agreeing is not None:
            tokens_B = tokens_B.contiguous()
            dist.broadcast(tokens_B, group=self.agreeing, group_src=0)
        return tokens_B

    def score_targets(self, tokens_BT: Tensor, places: Places, target_N: Tensor, vocab: int) -> Tensor:
        """Return the scores of `head_of_targets`, [N, 2], on every rank. Ranks exchange four numbers of each target."""
        assert self.transformer is not None
        tp = self.tp
        first_id, gather = (0, None) if tp is None else (tp.first_row, lambda x: tp.start_all_gather(x, axis=2)())
        head = head_of_targets(self.transformer, places, target_N, vocab, first_id, gather)
        scores_N2 = self._run_head(tokens_BT, head)
        if scores_N2 is None:
            scores_N2 = at_least_fp32(next(self.strategy.module.parameters()).new_empty(len(target_N), 2))
        return self.strategy.send_from_head(scores_N2)

    @torch.no_grad()
    def _run_head(self, tokens_BT: Tensor, head: HeadFunction) -> Tensor | None:
        """Return the result of the head; None on ranks without it."""
        with self.tp.whole_rows() if self.tp else nullcontext():
            return self.strategy.run_head(tokens_BT, head)

    def _gather_ids(self, local: Tensor | None) -> Tensor | None:
        """Return logits of all ids from those of this rank's."""
        if local is None or self.tp is None:
            return local
        # The last rank may have fewer ids.
        width = -(-self.spec.vocab_size // self.tp.size)
        padded = F.pad(local, (0, width - local.shape[-1]))
        return self.tp.start_all_gather(padded, axis=local.ndim - 1)()[..., : self.spec.vocab_size]
