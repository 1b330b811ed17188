"""A run with a model, loss, optimizer, learning-rate function and dataset of your own.

Try it from this directory: `phalanx train own_parts.toml --nproc 2`. Ranks import this module by its name.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    """Predicts tokens with gated recurrent units; `blocks` are gathered one at a time by zero3."""

    def __init__(self, spec):  # the [model] table
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        layers = [nn.GRU(spec.hidden_size, spec.hidden_size, batch_first=True) for _ in range(spec.num_layers)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size)

    def forward(self, tokens):  # [B, T] -> logits [B, T, V]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)[0]
        return self.head(x)


def smoothed(logits, targets, ignored, smoothing=0.1):
    """Return cross-entropy with label smoothing, summed over the targets that are not `ignored`."""
    flat = logits.flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=ignored, reduction="sum", label_smoothing=smoothing)


class Lion(torch.optim.Optimizer):
    """Steps by the sign of the averaged gradient (arXiv 2302.06675, algorithm 2)."""

    def __init__(self, params, lr, beta1=0.9, beta2=0.99, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                update = average.lerp(parameter.grad, 1 - group["beta1"]).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - group["beta2"])


def staircase(step, steps, stairs=4):
    """Return the learning rate as a share of the peak: halved `stairs` - 1 times."""
    return 0.5 ** (step * stairs // steps)


class Counting:
    """Sequences of the digits of consecutive numbers, as bytes."""

    def __init__(self, seq_len, samples=1000):
        self.seq_len = seq_len
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        text = " ".join(str(number) for number in range(index, index + self.seq_len))
        return np.frombuffer(text.encode()[: self.seq_len + 1], np.uint8)


class CountingStream:
    """The same sequences, in order, as an iterable dataset."""

    def __init__(self, seq_len):
        self.sequences = Counting(seq_len)

    def __iter__(self):
        return (self.sequences[index] for index in range(len(self.sequences)))
