"""Scans of new tokens from the state after earlier ones, and convolutions with the last of these.

Shapes: B rows, T tokens, C channels, S taps; those of heads as in the files of the scans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.mixers.gated_delta import inverse_length, log_decay, run_segments
from phalanx.model.mixers.mamba2 import limit_steps, run_chunks

if TYPE_CHECKING:
    from phalanx.model.token_cache import TokenCache


class CachedScan:
    """A scan with the state of each row, in place of the core of one layer."""

    def __init__(self, mixer: Any, cache: TokenCache) -> None:
        """Create the empty cache of a layer."""
        self.core = mixer.core
        self.cache = cache
        self.state = self.tail_BSC = self.taps_SC = torch.empty(0)
        """State after the last token, last inputs of the convolutions, and their taps."""
        self.bias_C: Tensor | None = None

    def __call__(self, *values_and_starts: Any, **parameters: Any) -> Tensor:
        """Return the output for the tokens of a pass, [B, T, H, V]; arguments are those of the core."""
        *values, _ = values_and_starts
        with torch.autocast(values[0].device.type, enabled=False):
            if self.cache.is_filled:
                return self.step(values, **parameters)[:, None].to(values[0].dtype)
            x_BTC = self.convolved(values)
            self.taps_SC, self.bias_C = self.filters(**parameters)
            self.tail_BSC = self._last_tokens(x_BTC, len(self.taps_SC) - 1)
            if not self.cache.is_ragged:
                out, self.state = self.run(values, **parameters)
                return out
            # The state after the last token of a row is not that after its padding.
            rows = [
                self.run([x[row : row + 1, :length] for x in values], **parameters)
                for row, length in enumerate(self.cache.lengths_B.tolist())
            ]
            self.state = torch.cat([state for _, state in rows])
            return torch.nn.utils.rnn.pad_sequence([out[0] for out, _ in rows], batch_first=True)

    def convolve(self, values: Sequence[Tensor]) -> Tensor:
        """Return the convolution at a new token of each row, [B, C], and remember the token."""
        window_BSC = torch.cat((self.tail_BSC, self.convolved(values)), dim=1)
        self.tail_BSC = window_BSC[:, 1:]
        out_BC = (window_BSC * self.taps_SC).sum(1)
        return out_BC if self.bias_C is None else out_BC + self.bias_C

    def _last_tokens(self, x_BTC: Tensor, count: int) -> Tensor:
        """Return the last tokens of each row, after zeros if it has fewer."""
        after_last_B1 = self.cache.lengths_B[:, None]
        rows = torch.arange(len(x_BTC), device=x_BTC.device)[:, None]
        return F.pad(x_BTC, (0, 0, count, 0))[rows, after_last_B1 + torch.arange(count, device=x_BTC.device)]

    # What subclasses define:

    def convolved(self, values: Sequence[Tensor]) -> Tensor:
        """Return the inputs of the convolutions, side by side, [B, T, C]."""
        return torch.cat([at_least_fp32(x).flatten(2) for x in values[:3]], dim=-1)

    def filters(self, **parameters: Any) -> tuple[Tensor, Tensor | None]:
        """Return the taps of the convolutions side by side, [S, C], and their biases [C] if they have any."""
        raise NotImplementedError

    def run(self, values: Sequence[Tensor], **parameters: Any) -> tuple[Tensor, Tensor]:
        """Return the output of rows of equal length from their first token on, and the state after them."""
        raise NotImplementedError

    def step(self, values: Sequence[Tensor], **parameters: Any) -> Tensor:
        """Return the output for one token of each row, [B, H, V], and update the state."""
        raise NotImplementedError


class CachedDelta(CachedScan):
    """The gated delta rule with its state, [B, G, K, R V]."""

    def filters(self, **parameters: Any) -> tuple[Tensor, None]:
        """Return the taps of queries, keys and values."""
        taps = (parameters[name].flatten(0, 1) for name in ("q_taps_GKS", "k_taps_GKS", "v_taps_HVS"))
        return at_least_fp32(torch.cat(list(taps))).T.contiguous(), None

    def run(self, values: Sequence[Tensor], **parameters: Any) -> tuple[Tensor, Tensor]:
        """Compute chunks of tokens, as in training."""
        self.form = self.core.keywords["form"]
        names = ("q_taps_GKS", "k_taps_GKS", "v_taps_HVS", "A_log_H", "dt_bias_HE")
        out_BTHV, states = run_segments(self.form, *values, *(parameters[name] for name in names), None)
        return out_BTHV, states[-1].flatten(3)

    def step(self, values: Sequence[Tensor], **parameters: Any) -> Tensor:
        """Apply the rule to one token: S <- e^g S, then S <- S + k (beta (v - S^T k))^T; the output is S^T q."""
        q_B1GK, _, v_B1HV, a_B1HE, b_B1H1 = values
        groups, key_width = q_B1GK.shape[2:]
        out_BC = F.silu(self.convolve(values))
        qk_BC, v_BC = out_BC.split((2 * groups * key_width, v_B1HV[0, 0].numel()), dim=-1)
        qk = qk_BC.unflatten(-1, (2, groups, 1, key_width))
        q_BG1K, k_BG1K = (qk * inverse_length(qk)).unbind(1)
        beta_BGR1 = at_least_fp32(b_B1H1[:, 0]).sigmoid().mul_(self.form.max_update).unflatten(1, (groups, -1))
        steps_BHE = at_least_fp32(a_B1HE[:, 0]) + parameters["dt_bias_HE"]
        rate_H1 = at_least_fp32(parameters["A_log_H"]).exp()[:, None]
        decay_BGRE = log_decay(self.form, steps_BHE, rate_H1).exp_().unflatten(1, (groups, -1))
        heads = decay_BGRE.shape[2]
        self.state.unflatten(-1, (heads, -1)).mul_(decay_BGRE.mT[..., None])
        errors = v_BC.unflatten(-1, (groups, heads, -1)) - (k_BG1K @ self.state).view(len(v_BC), groups, heads, -1)
        self.state.add_(k_BG1K.mT * (errors * beta_BGR1).flatten(2).unsqueeze(2))
        return ((q_BG1K * key_width**-0.5) @ self.state).view(v_B1HV[:, 0].shape)


class CachedMamba2(CachedScan):
    """Mamba-2 with its state, [B, G, N, R P]."""

    def filters(self, **parameters: Any) -> tuple[Tensor, Tensor | None]:
        """Return the taps and biases of values, keys and queries."""
        names = ("value", "key", "query")
        taps = torch.cat([parameters[f"{name}_taps"].flatten(0, 1) for name in names])
        biases = [parameters[f"{name}_bias"] for name in names]
        bias_C = None if biases[0] is None else torch.cat([bias.flatten() for bias in biases])
        return at_least_fp32(taps).T.contiguous(), bias_C

    def run(self, values: Sequence[Tensor], **parameters: Any) -> tuple[Tensor, Tensor]:
        """Compute chunks of tokens, as in training."""
        of_heads = (parameters[name] for name in ("log_rate_H", "skip_H", "step_bias_H"))
        filters = [
            None if (filter := parameters[f"{name}_{kind}"]) is None else filter.flatten(0, 1)
            for name in ("value", "key", "query")
            for kind in ("taps", "bias")
        ]
        *inputs, steps_BTH1 = values
        out, states = run_chunks(parameters["spec"], None, *inputs, steps_BTH1.squeeze(-1), *of_heads, *filters)
        return out, states[-1].unflatten(0, (len(out), -1))

    def step(self, values: Sequence[Tensor], **parameters: Any) -> Tensor:
        """Apply the recurrence to one token: S <- exp(-r d) S + d B x^T; the output is S^T C + D x."""
        x_B1HP, keys_B1GN, _, steps_B1H1 = values
        groups, width = keys_B1GN.shape[2:]
        x_BC, kq_BC = F.silu(self.convolve(values)).split((x_B1HP[0, 0].numel(), 2 * groups * width), dim=-1)
        x_BHP = x_BC.view(x_B1HP[:, 0].shape)
        keys_BG1N, queries_BG1N = kq_BC.unflatten(-1, (2, groups, 1, width)).unbind(1)
        steps_BH = limit_steps(parameters["spec"], steps_B1H1[:, 0, :, 0], parameters["step_bias_H"])
        decay_BH = (steps_BH * -at_least_fp32(parameters["log_rate_H"]).exp()).exp_()
        decay_BG1R1 = decay_BH.unflatten(1, (groups, 1, -1))[..., None]
        self.state.unflatten(-1, (decay_BG1R1.shape[3], -1)).mul_(decay_BG1R1)
        weighed = (x_BHP * steps_BH[..., None]).view(len(x_BHP), groups, 1, -1)
        self.state.add_(keys_BG1N.mT * weighed)
        out_BHP = (queries_BG1N @ self.state).view(x_BHP.shape)
        return out_BHP.addcmul_(x_BHP, at_least_fp32(parameters["skip_H"])[:, None])


class CachedConvolution(CachedScan):
    """The gated short convolution, which has no state but its last inputs."""

    def convolved(self, values: Sequence[Tensor]) -> Tensor:
        """Return the products of input gate and values."""
        input_gate, _, x = values
        return (at_least_fp32(input_gate) * x).squeeze(-1)

    def filters(self, **parameters: Any) -> tuple[Tensor, Tensor | None]:
        """Return the taps and the bias."""
        return at_least_fp32(parameters["taps_CS"]).T, parameters["bias_C"]

    def run(self, values: Sequence[Tensor], **parameters: Any) -> tuple[Tensor, Tensor]:
        """Compute all tokens, as in training."""
        return self.core(*values, None, **parameters), self.state

    def step(self, values: Sequence[Tensor], **parameters: Any) -> Tensor:
        """Convolve one token."""
        return (self.convolve(values) * values[1][:, 0, :, 0])[..., None]
