"""Losses of pairs of a chosen answer y_w and a rejected one y_l to a prompt x (direct preference optimization).

With the score s(y) = log pi(y|x) - log pi_ref(y|x) of an answer, and d = s(y_w) - s(y_l):

    sigmoid    -log sigmoid(beta d)                                    DPO, arXiv 2305.18290, equation 7
               -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)   label smoothing e (conservative DPO)
    ipo        (d - 1 / (2 beta))^2                                    IPO, arXiv 2310.12036, equation 17

A log-probability is the sum of those of the answer's tokens. Length-normalized DPO (arXiv 2411.15124, section 5) and
IPO use their mean in place of it; for IPO, that is what its authors confirmed (a comment in trl's `dpo_trainer.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from phalanx.spec.preference import PreferenceSpec


class PairLosses(NamedTuple):
    """Losses of pairs, and the difference of their rewards beta s(y), each [P]."""

    loss: Tensor
    margin: Tensor


def pair_losses(spec: PreferenceSpec, log_probs_P2: Tensor, reference_P2: Tensor, num_targets_P2: Tensor) -> PairLosses:
    """Return the losses of pairs, from log-probabilities and numbers of tokens of chosen and rejected answers."""
    score_P2 = log_probs_P2 - reference_P2
    if spec.length_normalized or spec.loss == "ipo":
        score_P2 = score_P2 / num_targets_P2
    difference_P = score_P2[:, 0] - score_P2[:, 1]
    margin_P = spec.beta * difference_P
    if spec.loss == "ipo":
        loss_P = (difference_P - 1 / (2 * spec.beta)).square()
    else:
        loss_P = -F.logsigmoid(margin_P)
        if spec.label_smoothing:
            loss_P = (1 - spec.label_smoothing) * loss_P - spec.label_smoothing * F.logsigmoid(-margin_P)
    return PairLosses(loss_P, margin_P.detach())
