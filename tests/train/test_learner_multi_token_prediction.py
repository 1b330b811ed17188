"""The loss of multi-token prediction, against its formula (DeepSeek-V3, arXiv 2412.19437, eq. 24 and 25)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.loader import prefetch
from phalanx.model.transformer import Ahead, cap_logits
from phalanx.train.learner import MicroBatch
from phalanx.train.trainer import Trainer
from tests.helpers.small_runs import DENSE, make_trainer, small_run

COEF = 0.3
MODEL = {**DENSE, "mtp": {"layers": 2, "loss_coef": COEF}}


def losses_by_formula(trainer: Trainer, micro: MicroBatch) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of the next token, and those of each further one, summed over tokens."""
    logits: list[Tensor] = []

    def keep_logits(x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        logits.append(cap_logits(F.linear(x_BTD, weight_VD), trainer.run.model.logits_softcap))
        return x_BTD.new_zeros(())

    assert micro.tokens_ahead is not None
    assert micro.targets_ahead is not None
    ahead = Ahead(micro.tokens_ahead, [keep_logits] * 2)
    first, _ = trainer.module(micro.tokens, micro.documents, ahead=ahead)
    targets = [micro.targets, *micro.targets_ahead]
    loss, *further = (
        F.cross_entropy(each.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100)
        for each, target in zip([first, *logits], targets, strict=True)
    )
    return loss, further


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_mean_loss_of_further_tokens_is_added_with_its_weight(
    softcap: float | None, documents: Path, tmp_path: Path
) -> None:
    run = small_run(documents, tmp_path, {"model": {**MODEL, "logits_softcap": softcap}})
    trainer = make_trainer(run)
    (batch,) = islice(prefetch(trainer.loader, 0, 1), 1)
    micros = trainer.micro_batches(batch)
    totals = torch.zeros(2, dtype=torch.float64)
    for micro in micros:
        loss, further = losses_by_formula(trainer, micro)
        totals += torch.stack([loss.detach(), torch.stack(further).detach().mean()])
        (loss + COEF * torch.stack(further).mean()).backward()
    expected = {name: parameter.grad for name, parameter in trainer.module.named_parameters()}
    trainer.module.zero_grad()

    sums = trainer.forward_backward(trainer.micro_batches(batch))
    assert [float(sums.loss), float(sums.mtp_loss)] == pytest.approx(totals.tolist(), rel=1e-12)
    assert float(sums.auxiliary_loss) == pytest.approx(0, abs=1e-9 * float(totals[0]))
    for name, parameter in trainer.module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10)


def test_metrics_have_the_mean_loss_of_further_tokens(text: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_run(text, tmp_path, {"model": MODEL}))
    batches = prefetch(trainer.loader, 0, 1)
    record = trainer.train_step(batches)
    assert record["mtp_loss"] == pytest.approx(record["loss"], rel=0.2)
    assert "auxiliary_loss" not in record
