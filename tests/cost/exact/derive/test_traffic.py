"""Messages of a part that no model of ours has yet."""

from __future__ import annotations

from phalanx.cost.exact.derive.traffic import part_traffic
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.layout import Layout
from phalanx.spec.parts.operations import Cut, Part, Value
from phalanx.spec.tensor_sharding import operation_sharding

BATCH, TOKENS, RANKS = 2, 24, 2


def test_ranks_gather_the_latent_that_cut_products_read() -> None:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434) gathers 8 numbers of a token, not the 32 of its input."""
    x = Value(32, tokens="residual", numbers="residual")
    part = Part("attention", "attention", x)
    latent = part.linear("wa", x, width=8)
    heads = part.linear("wk", latent, Cut("heads", 4, unit=6))
    part.linear("wv", latent, Cut("heads", 4, unit=5))
    part.linear("wo", heads)
    layout = Layout(tp=RANKS)
    shape = ForwardShape(batch=BATCH, sequence=TOKENS, precision="fp32", layout=layout, autocast=False, masked=False)
    traffic = part_traffic(part, shape)
    number_bytes = BATCH * TOKENS * 4 * (RANKS - 1) / RANKS
    assert [(row.operation, row.bytes / number_bytes) for row in traffic.forward] == [
        ("all_gather", 8),
        ("reduce_scatter", 32),
    ]
    assert sorted((row.operation, row.bytes / number_bytes) for row in traffic.backward) == [
        ("all_gather", 8),
        ("all_gather", 32),
        ("reduce_scatter", 8),
    ]
    shardings = {linear.name: operation_sharding(linear, f"{linear.name}.weight", layout) for linear in part.linears}
    assert {name: sharding.dim for name, sharding in shardings.items()} == {"wa": None, "wk": 0, "wv": 0, "wo": 1}
    assert [name for name, sharding in shardings.items() if sharding.is_partial_sum] == ["wa"]
