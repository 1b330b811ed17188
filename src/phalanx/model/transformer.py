"""A decoder-only transformer, independent of ranks: `parallel.apply` applies layouts to it.

Shapes: B batch, T tokens, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.attention import Attention, attention_mask
from phalanx.model.dropout import product_key
from phalanx.model.dtypes import at_least_fp32
from phalanx.model.embedding import Embedding, scaled
from phalanx.model.mixers import make_mixer
from phalanx.model.mixers.latent_attention import LatentAttention
from phalanx.model.mlp import MLP
from phalanx.model.moe import MoE
from phalanx.model.norm import identity, make_norm, rms_norm
from phalanx.model.part import PartModule
from phalanx.model.per_layer_inputs import PerLayerBranch, PerLayerInputs
from phalanx.model.products import ProductLinear
from phalanx.model.sequence_context import Documents, MaskFunction, SequenceContext, positions_in_document
from phalanx.model.tied_weight import TiedWeight
from phalanx.spec.attention_backend import has_sinks, has_softcap, has_window
from phalanx.spec.layers import check_sequence, distinct_layers, layer_specs
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import Branch, blocks, describe_last_norm
from phalanx.spec.parts.model import layer_inputs, model_parameters, num_forward_only_blocks
from phalanx.spec.parts.operations import Norm, Part

HeadFunction = Callable[[Tensor, Tensor], Tensor]
"""Function of the head's input [B, T, D] and matrix [V, D]."""


@dataclass(frozen=True)
class Ahead:
    """Inputs and losses of the layers for multi-token prediction in a micro-batch."""

    tokens: Tensor
    """The token after the last one that the layer before has read, [layers, B, T]."""
    losses: Sequence[HeadFunction]
    """The loss of the layer's logits, summed over tokens and weighted."""


class Block(nn.Module):
    """A transformer block: x + attention(norm x), then x + mlp(norm x); norms may follow instead, or too.

    `attention` may be another mixer of tokens, or have one parallel to it, whose output is added to its own. With a
    dense branch, x + dense(norm x) + mlp(norm x) follows. Or all is parallel, x + attention(norm x) + mlp(norm x),
    perhaps with one norm. A block may have one of both branches only. For multi-token prediction, x is first merged
    with the embedding of another token. The block may add a product of an input of its layer at the end."""

    merge: Merge | None
    attention_norm: nn.Module
    attention: PartModule | None
    attention_after: nn.Module
    side_mixer: PartModule | None
    dense_norm: nn.Module
    dense: MLP | None
    dense_after: nn.Module
    mlp_norm: nn.Module
    mlp: MLP | MoE | None
    mlp_after: nn.Module
    per_layer: PerLayerBranch | None
    per_layer_after: nn.Module
    layer_scalar: Tensor | None

    def __init__(self, layer: ModelSpec, branches: Sequence[Branch]) -> None:
        """Create the block of a layer (`spec.layers`) from its declaration."""
        super().__init__()
        self.residual_scale = branches[-1].scale
        by_name = {branch.part.name: branch for branch in branches}
        for name, branch in by_name.items():
            self.add_module(f"{name}_norm", _make_norm(branch.before))
            self.add_module(name, _make_part(layer, branch.part))
            self.add_module(f"{name}_after", _make_norm(branch.after))
            if name == "mlp":
                self.sum_after = _make_norm(branch.after_sum)
        self.stream_after = _make_norm(branches[-1].after_stream)
        self.is_parallel = "mlp" in by_name and by_name["mlp"].shares_input and "dense" not in by_name
        self.has_one_norm = "mlp" in by_name and by_name["mlp"].shares_norm
        self.register_buffer("layer_scalar", torch.ones(1) if layer.layer_scalars else None)
        for name in {"merge", "attention", "side_mixer", "dense", "mlp", "per_layer"} - by_name.keys():
            self.register_module(name, None)

    def sequence_inputs(self, context: SequenceContext) -> tuple[Any, ...]:
        """Return what the mixer needs of a micro-batch's sequences, and the one argument of that parallel to it."""
        inputs = self.attention.sequence_inputs(context) if self.attention else ()
        return (*inputs, *self.side_mixer.sequence_inputs(context)) if self.side_mixer else inputs

    def forward(
        self,
        x_BTD: Tensor,
        *sequence_inputs: Any,
        embedding_BTD: Tensor | None = None,
        given_BTP: Tensor | None = None,
        keys_and_values: Sequence[Tensor] = (),
    ) -> tuple[Any, ...]:
        """Return the block's output [B, T, D] and its auxiliary loss summed over tokens, or None without experts.

        The keys and values follow if later blocks read them. Further arguments are those of `sequence_inputs`. With an
        embedding, the block predicts a further token. `given_BTP` is the input of its layer, and `keys_and_values` are
        those of an earlier block, if it has none."""
        if self.merge is not None:
            x_BTD = self.merge(x_BTD, embedding_BTD)
        other = auxiliary = None
        shared: Sequence[Tensor] = ()
        if self.attention is not None:
            normalized = self.attention_norm(x_BTD)
            *inputs, last_input = (*sequence_inputs, None) if self.side_mixer is None else sequence_inputs
            other = self.attention(normalized, *inputs, *keys_and_values)
            if isinstance(other, tuple):
                other, *shared = other
            other = self.attention_after(other)
            if self.side_mixer is not None:
                other = other + self.side_mixer(normalized, last_input)
        if other is not None and not self.is_parallel:
            x_BTD = self._add(x_BTD, other)
            other = None
        if self.mlp is not None:
            if self.dense:
                other = self.dense_after(self.dense(self.dense_norm(x_BTD)))
            if not self.has_one_norm:
                normalized = self.mlp_norm(x_BTD)
            out, auxiliary = self.mlp(normalized, x_BTD) if isinstance(self.mlp, MoE) else (self.mlp(normalized), None)
            out = self.mlp_after(out)
            x_BTD = self._add(x_BTD, out if other is None else self.sum_after(other + out))
        if self.per_layer is not None:
            x_BTD = self._add(x_BTD, self.per_layer_after(self.per_layer(x_BTD, given_BTP)))
        return self.stream_after(self._scale(x_BTD)), auxiliary, *shared

    def _scale(self, x_BTD: Tensor) -> Tensor:
        """Return the residual stream times the constant of the layer, if it has one."""
        return x_BTD if self.layer_scalar is None else x_BTD * self.layer_scalar[0]

    def _add(self, x_BTD: Tensor, out: Tensor) -> Tensor:
        """Return the residual stream with the output of a branch."""
        return x_BTD + out if self.residual_scale == 1 else torch.add(x_BTD, out, alpha=self.residual_scale)


def _make_norm(norm: Norm | None) -> nn.Module:
    return make_norm(norm) if norm else nn.Identity()


def _make_part(layer: ModelSpec, part: Part) -> PartModule:
    if part.kind == "merge":
        return Merge(part)
    if part.name == "per_layer":
        return PerLayerBranch(part)
    if part.kind == "attention":
        return make_mixer(layer, part)
    return MoE(layer.moe, part) if layer.moe and part.kind == "experts" else MLP(part)


class Merge(PartModule):
    """The input of a layer for multi-token prediction, W [norm e; norm x] (arXiv 2412.19437, eq. 21).

    The order is that of released weights; the paper has the stream first."""

    embedding_norm: nn.Module
    stream_norm: nn.Module
    projection: nn.Module

    def forward(self, x_BTD: Tensor, embedding_BTD: Tensor) -> Tensor:
        """Return the product of the norms of the residual stream and of the embedding of another token, [B, T, D]."""
        normalized = torch.cat([self.embedding_norm(embedding_BTD), self.stream_norm(x_BTD)], dim=-1)
        return cast(Tensor, self.projection(normalized)).to(x_BTD.dtype)  # autocast would return bf16


class Head(nn.Module):
    """The matrix of the logits. It is called, because FSDP2 gathers it in hooks of modules."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, inputs: Sequence[Tensor], functions: Sequence[HeadFunction]) -> list[Tensor]:
        """Return the result of each input's function of it and the matrix, which is gathered for one call only."""
        return multiply_with(self.weight, inputs, functions)


def multiply_with(weight_VD: Tensor, inputs: Sequence[Tensor], functions: Sequence[HeadFunction]) -> list[Tensor]:
    """Return the result of each input's function of it [B, T, D] and a matrix."""
    return [function(x_BTD, weight_VD) for x_BTD, function in zip(inputs, functions, strict=True)]


class Transformer(nn.Module):
    """Embedding, L blocks, norm and head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.has_positions = any(
            layer.position_embedding == "rope" or layer.query_temperature or layer.attention_chunk
            for layer in distinct_layers(spec)
        )
        """True if blocks need the positions of tokens."""
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size)
        if spec.position_embedding == "learned":
            self.positions = Embedding(spec.max_seq_len, spec.hidden_size)
        if inputs := layer_inputs(spec):
            self.per_layer_inputs = PerLayerInputs(inputs)
        self.blocks = nn.ModuleList(map(Block, layer_specs(spec), blocks(spec)))
        self.norm = make_norm(describe_last_norm(spec))
        self.kv_sources = spec.kv_sources
        for source in set(self.kv_sources.values()):
            cast(Attention, cast(Block, self.blocks[source]).attention).returns_keys = True
        if not spec.tie_embeddings:
            self.head = Head(spec.hidden_size, spec.vocab_size)
        for name, module in self.named_modules():
            if isinstance(module, ProductLinear) and module.adapter and module.adapter.dropout:
                module.adapter.dropout.key = product_key(name)
        for name, parameter in model_parameters(spec).items():
            self.get_parameter(name).requires_grad_(not parameter.is_frozen)
        self.num_forward_only_blocks = num_forward_only_blocks(spec)
        """Number of blocks, the first ones, without a backward pass."""
        # What layouts replace:
        self.logits: HeadFunction = F.linear
        self.local_positions: Callable[[Tensor], Tensor] = row_positions
        """Function of token ids [B, T] or an input of blocks [B, T, D]: the positions in their row of the tokens whose
        attention is computed on this rank, [T]."""
        self.num_context_ranks = 1
        """Number of ranks that share the tokens of a row in attention."""
        self.attention_mask: MaskFunction = partial(document_mask, spec)
        """Mask argument of attention in a dtype, with heads of a width."""
        self.sum_auxiliary: Callable[[Tensor], Tensor] = identity
        """Sum of the auxiliary loss over ranks that have shares of the tokens."""
        # A call, because a forward hook would break the graphs of compiled blocks.
        self.wait_for_parameters: Callable[[nn.Module], None] = do_not_wait
        """Wait of ZeRO for the new weights of a module (`parallel.data.zero_gathers`)."""

    def forward(
        self,
        tokens_BT: Tensor,
        documents: Documents | None = None,
        head: HeadFunction | None = None,
        ahead: Ahead | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits [B, T, V] of each next token, and the auxiliary loss summed over layers and tokens.

        Documents do not attend to each other, and each counts its positions from 0. Without them, every row is one
        document. The result of `head` replaces the logits. The losses of multi-token prediction are part of the
        auxiliary one; without `ahead` its layers do not run."""
        # One call, because FSDP2 would gather the first blocks again in another.
        tokens = tokens_BT if ahead is None else torch.cat([tokens_BT, *ahead.tokens])
        tied = TiedWeight(self.embedding.weight) if self.spec.tie_embeddings and torch.is_grad_enabled() else None
        x_BTD, *embeddings = self.embed(tokens, documents, tied).split(len(tokens_BT))
        given: Sequence[Tensor] = ()
        if self.spec.per_layer_input_size:
            self.wait_for_parameters(self.per_layer_inputs)
            given = self.per_layer_inputs(tokens_BT, x_BTD)
        blocks = list(self.blocks)[: self.spec.num_layers]
        return self.finish(blocks, x_BTD, documents, head, ahead, embeddings, given, tied)

    def finish(
        self,
        blocks: Iterable[nn.Module],
        x_BTD: Tensor,
        documents: Documents | None,
        head: HeadFunction | None,
        ahead: Ahead | None,
        embeddings: Sequence[Tensor],
        given: Sequence[Tensor] = (),
        tied: TiedWeight | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits after the last blocks of the model, and the auxiliary loss of these.

        `embeddings` are those of the tokens of `ahead`, [B, T, D], and `given` the inputs of layers, [B, T, P]. `tied`
        is the matrix that `embed` has used."""
        context = self.sequence_context(x_BTD, documents)
        x_BTD, auxiliary = self.run_blocks(blocks, x_BTD, context, given)
        del given
        self.wait_for_parameters(self)
        x_BTD = self.norm(x_BTD)
        inputs = [x_BTD]
        for block, embedding in zip(self._prediction_blocks if ahead else (), embeddings, strict=True):
            x_BTD, block_auxiliary = self.run_blocks([block], x_BTD, context, embedding_BTD=embedding)
            auxiliary = auxiliary + block_auxiliary
            inputs.append(x_BTD)
        del context  # its positions
        out, *losses = self.apply_head(inputs, [head or self.logits, *(ahead.losses if ahead else ())], tied)
        auxiliary = sum(losses, self.sum_auxiliary(auxiliary))
        return (out if head else cap_logits(out, self.spec.logits_softcap)), auxiliary

    @property
    def _prediction_blocks(self) -> list[nn.Module]:
        """The blocks for multi-token prediction, which are the last ones."""
        return list(self.blocks.children())[-self.spec.num_prediction_layers :]

    def embed(self, tokens_BT: Tensor, documents: Documents | None, tied: TiedWeight | None = None) -> Tensor:
        """Return the input of the first block, [B, T, D]. Raises UserError for more tokens than mixers compute."""
        check_sequence(self.spec, "tokens", tokens_BT.shape[1])
        self.wait_for_parameters(self.embedding)
        x_BTD = self.embedding(tokens_BT, tied.of_embedding() if tied else None)
        if self.spec.embedding_scale != 1:
            x_BTD = scaled(x_BTD, self.spec.embedding_scale)
        if self.spec.position_embedding == "learned":
            self.wait_for_parameters(self.positions)
            x_BTD = x_BTD + self.positions(positions_in_document(self.local_positions(tokens_BT), documents))
        return rms_norm(x_BTD, None, self.spec.norm_eps) if self.spec.embedding_norm else x_BTD

    def sequence_context(self, x_BTD: Tensor, documents: Documents | None) -> SequenceContext:
        """Return what blocks with an input like `x_BTD` need of a micro-batch's sequences."""
        row_positions_T = self.local_positions(x_BTD) if self.has_positions else None
        return SequenceContext(x_BTD, row_positions_T, documents, self.attention_mask, self.num_context_ranks)

    def run_blocks(
        self,
        blocks: Iterable[nn.Module],
        x_BTD: Tensor,
        context: SequenceContext,
        given: Sequence[Tensor] = (),
        **embedding: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of some blocks, [B, T, D], and their auxiliary loss summed over blocks and local tokens.

        `given` are the inputs of layers. If layers read keys and values of others, the blocks are all of the model."""
        auxiliary = at_least_fp32(x_BTD.new_zeros(()))
        keys_and_values: dict[int, Sequence[Tensor]] = {}
        for layer, block in enumerate(cast(Iterable[Block], blocks)):
            self.wait_for_parameters(block)
            others: dict[str, Any] = {"given_BTP": given[layer]} if given else {}
            if layer in self.kv_sources:
                others["keys_and_values"] = keys_and_values[self.kv_sources[layer]]
            if layer == self.num_forward_only_blocks and torch.is_grad_enabled():
                x_BTD = requiring_gradient(x_BTD)
            inputs = block.sequence_inputs(context)
            x_BTD, block_auxiliary, *shared = block(x_BTD, *inputs, **embedding, **others)
            if shared:
                keys_and_values[layer] = shared
            if block_auxiliary is not None:
                auxiliary = auxiliary + block_auxiliary
        return x_BTD, auxiliary

    def apply_head(
        self, inputs: Sequence[Tensor], functions: Sequence[HeadFunction], tied: TiedWeight | None
    ) -> list[Tensor]:
        """Return the result of each input's function of it, [B, T, D], and the head's matrix."""
        if self.spec.logits_divisor != 1:
            inputs = [x / self.spec.logits_divisor for x in inputs]
        if self.spec.tie_embeddings:
            return multiply_with(tied.of_head() if tied else self.head_weight, inputs, functions)
        return cast(list[Tensor], self.head(inputs, functions))

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix, [V, D]."""
        return self.embedding.weight if self.spec.tie_embeddings else self.head.weight


def requiring_gradient(x_BTD: Tensor) -> Tensor:
    """Return a tensor that requires a gradient, so that the first trained block has a backward pass like the others."""
    if x_BTD.requires_grad:
        return x_BTD
    return cast(Tensor, _RequiringGradient.apply(x_BTD, torch.empty(0, requires_grad=True)))


class _RequiringGradient(torch.autograd.Function):
    """A tensor as it is, whose gradient is dropped. That of a leaf would be kept as long as the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return c tanh(z / c) of logits z and a cap c, if there is one (Gemma 2, arXiv 2408.00118, section 2)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def do_not_wait(module: nn.Module) -> None:
    """Return at once: all weights of a module are there."""


def row_positions(x_BT: Tensor) -> Tensor:
    """Return the positions of all tokens of a row, [T]."""
    return torch.arange(x_BT.shape[1], device=x_BT.device)


def document_mask(spec: ModelSpec, documents: Documents, dtype: torch.dtype, head_dim: int) -> Tensor:
    """Return the mask argument of attention in `dtype`, with heads of a width."""
    window = has_window(spec, documents.starts.shape[1])
    return attention_mask(documents, dtype, head_dim, window, has_sinks(spec), has_softcap(spec))


def set_rotary_embedding(module: nn.Module, spec: ModelSpec) -> None:
    """Give the layers of a network, or of its stages, the parameters of the rotary embedding of a description."""
    layers = layer_specs(spec)
    for name, mixer in module.named_modules():
        if isinstance(mixer, Attention | LatentAttention) and mixer.rope is not None:
            mixer.rope = layers[int(name.split(".")[1])].rope
