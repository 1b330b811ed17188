"""Losses of distillation, of which those of single tokens are weighted."""

import torch

from phalanx.parallel.cross_entropy import LossScale, LossTerms
from phalanx.parallel.distillation_loss import TeacherHead, sum_distillation_losses

IGNORED = -100


def test_losses_divergences_and_gradients_of_tokens_have_their_weights():
    torch.manual_seed(0)
    logits, taught = 3 * torch.randn(2, 9, 33, dtype=torch.float64)
    targets = torch.randint(33, (9,))
    targets[4] = IGNORED
    weights = torch.rand(9, dtype=torch.float64)
    terms = LossTerms(torch.arange(9) % 2, torch.zeros(2, dtype=torch.float64), weights)
    head = {"x": logits, "weight": logits, "softcap": None, "temperature": 2.0, "share": 0.4}

    def loss_and_gradient(rows, terms):
        teacher = TeacherHead(**head)
        x = logits[rows].clone()
        options = teacher, None, LossScale(), None, terms
        loss = sum_distillation_losses(x, taught[rows].clone(), targets[rows], IGNORED, *options)
        return loss, x, teacher.divergences[0]

    alone = [loss_and_gradient(slice(row, row + 1), None) for row in range(9)]
    losses, gradients, divergences = (torch.stack(values) for values in zip(*alone, strict=True))
    loss, gradient, divergence = loss_and_gradient(slice(None), terms)
    torch.testing.assert_close(loss, (weights * losses).sum())
    torch.testing.assert_close(divergence, (weights * divergences).sum())
    torch.testing.assert_close(gradient, weights[:, None] * gradients[:, 0])
    torch.testing.assert_close(terms.sums[0], (weights * losses)[::2].sum())
