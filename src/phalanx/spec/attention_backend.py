"""The kernel of attention's core, chosen from the device, the precision and the model."""

from __future__ import annotations

from enum import StrEnum

from phalanx.spec.layers import distinct_layers, layer_specs
from phalanx.spec.model import ModelSpec, is_flash_head_dim
from phalanx.spec.run import RunSpec


class AttentionBackend(StrEnum):
    """Kernels of causal attention."""

    SDPA = "scaled_dot_product_attention"
    """All earlier tokens of a row are visible."""
    SDPA_MASKED = "scaled_dot_product_attention with a dense mask"
    """The documents of a row are hidden from each other by a mask of T x T."""
    CPU_FLASH = "flash by document"
    """PyTorch's flash kernel of CPUs, once per document or block of a window; with a cap, plain operations."""
    VARLEN = "varlen (flash)"
    """Flash attention within documents on CUDA, `torch.nn.attention.varlen`."""
    FLEX = "FlexAttention"
    """Compiled FlexAttention, where CUDA has no flash kernel for windows, sinks and caps."""


def choose_backend(
    device: str, *, half_precision: bool, head_dim: int, documents: bool, window: bool, sinks: bool, softcap: bool
) -> AttentionBackend:
    """Return the kernel of attention's core.

    `documents`: documents in a row are hidden from each other. `window`: rows are longer than the sliding window of
    some layers. `softcap`: some layers cap their scores.
    """
    if not (documents or window or sinks or softcap):
        return AttentionBackend.SDPA
    if device == "cpu":
        return AttentionBackend.CPU_FLASH
    if device == "cuda" and half_precision and is_flash_head_dim(head_dim) and not softcap:
        return AttentionBackend.VARLEN
    return AttentionBackend.FLEX if window or sinks or softcap else AttentionBackend.SDPA_MASKED


def model_backend(
    spec: ModelSpec, seq_len: int, device: str, *, half_precision: bool, head_dim: int, documents: bool
) -> AttentionBackend:
    """Return the kernel of layers with heads of a width. All layers mask alike, so a dial of any counts."""
    return choose_backend(
        device,
        half_precision=half_precision,
        head_dim=head_dim,
        documents=documents,
        window=has_window(spec, seq_len),
        sinks=has_sinks(spec),
        softcap=has_softcap(spec),
    )


def has_window(spec: ModelSpec, seq_len: int) -> bool:
    """Return whether some layers hide keys of a sequence of `seq_len` tokens by their window."""
    return any(hides_keys(layer, seq_len) for layer in distinct_layers(spec))


def smallest_window(spec: ModelSpec) -> int | None:
    """Return the smallest window of the layers; None if no layer has one."""
    return min((layer.sliding_window for layer in distinct_layers(spec) if layer.sliding_window), default=None)


def has_sinks(spec: ModelSpec) -> bool:
    """Return whether some layers have attention sinks."""
    return any(layer.attention_sinks for layer in distinct_layers(spec))


def has_softcap(spec: ModelSpec) -> bool:
    """Return whether some layers cap attention's scores."""
    return any(layer.attention_softcap for layer in distinct_layers(spec))


def has_chunks(layer: ModelSpec, seq_len: int) -> bool:
    """Return whether a layer (`spec.layers`) attends in several chunks of a sequence of `seq_len` tokens."""
    return layer.attention_chunk is not None and layer.attention_chunk < seq_len


def hides_keys(layer: ModelSpec, seq_len: int) -> bool:
    """Return whether the window of a layer (`spec.layers`) hides keys of a sequence of `seq_len` tokens."""
    return layer.sliding_window is not None and layer.sliding_window < seq_len


def describe_attention(run: RunSpec) -> str:
    """Return the kernel that a run's attention uses, with its window and sinks, in one line."""
    spec = run.model
    seq_len = run.training.seq_len
    backend = model_backend(
        spec,
        seq_len,
        "cuda" if run.cluster.uses_cuda else "cpu",
        half_precision=run.training.precision not in ("fp32", "fp64"),
        head_dim=max(layer.head_dim for layer in distinct_layers(spec)),
        documents=run.data.mask_documents or any(has_chunks(layer, seq_len) for layer in distinct_layers(spec)),
    )
    is_ring = run.layout.cp > 1 and run.layout.cp_method == "ring"
    parts = ["ring of keys and values" if is_ring else str(backend)]
    if has_window(spec, seq_len):
        windows = [layer.sliding_window for layer in layer_specs(spec) if hides_keys(layer, seq_len)]
        layers = f" in {len(windows)} of {spec.num_blocks} layers" if len(windows) < spec.num_blocks else ""
        parts.append(f"window {' or '.join(map(str, dict.fromkeys(windows)))}{layers}")
    chunked = [layer.attention_chunk for layer in layer_specs(spec) if has_chunks(layer, seq_len)]
    if chunked:
        layers = f" in {len(chunked)} of {spec.num_blocks} layers" if len(chunked) < spec.num_blocks else ""
        parts.append(f"chunks of {' or '.join(map(str, dict.fromkeys(chunked)))}{layers}")
    if has_sinks(spec):
        parts.append("sinks")
    if has_softcap(spec):
        parts.append("capped scores")
    return ", ".join(parts)
