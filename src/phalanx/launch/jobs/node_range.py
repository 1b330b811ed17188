"""Fixes for a run that fails with some number of nodes of a range: values that suit every number of the range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, lcm

from phalanx.cost.exact.layout_checks import layout_error
from phalanx.spec.base import divisors
from phalanx.spec.batch import STRATEGIES_WITH_UNEVEN_BATCHES
from phalanx.spec.errors import UserError
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

MAX_BATCH_CHANGE = 2
"""Maximum ratio of the tokens per step that a fix suggests to those of the run: beyond it, it is another training."""
MAX_TRIED_BATCHES = 16
"""Maximum number of batches that are tried, the nearest first."""


def fix_for_node_range(run: RunSpec, error: UserError, node_counts: range, nproc: int) -> str:
    """Return the fix of an error of one number of nodes that does not lead to an error of another number.

    `error` is that of `check_layout` with the minimum or the maximum number of nodes.
    """
    ends = [node_counts[0] * nproc, node_counts[-1] * nproc]
    if error.field == "training.tokens_per_step":
        return _suggest_batch(run, node_counts, nproc)
    if error.field not in ("layout.dp_shard", "layout.micro_batch_size"):
        return error.fix
    sequences = run.training.tokens_per_step // run.training.seq_len
    candidates = divisors(gcd(*ends) if error.field == "layout.dp_shard" else sequences)
    suitable = [str(value) for value in candidates if _is_valid_for(_replace_field(run, error.field, value), ends)]
    if not suitable:
        return error.fix
    return f"use one of {', '.join(suitable)}, which suit {node_counts[0]} and {node_counts[-1]} nodes"


def _suggest_batch(run: RunSpec, node_counts: range, nproc: int) -> str:
    """Return the tokens per step that suit each number of nodes, or both ends, or why there are none."""
    first = node_counts[0]
    last = node_counts[-1]
    ends = [first * nproc, last * nproc]
    # Nodes that the layout cannot use stand by, whatever the batch.
    usable = [nodes * nproc for nodes in node_counts if _dp_sizes(run, [nodes * nproc])]
    if (tokens := _find_tokens_per_step(run, usable)) is not None:
        return f"use training.tokens_per_step = {tokens}, which suits each number of nodes from {first} to {last}"
    if (tokens := _find_tokens_per_step(run, ends)) is not None:
        return f"use training.tokens_per_step = {tokens}, which suits {first} and {last} nodes; other nodes stand by"
    dp_sizes = _dp_sizes(run, ends)
    multiple = f"no common multiple below {lcm(*dp_sizes)} sequences"
    reason = f"{' and '.join(map(str, dp_sizes))} data-parallel ranks have {multiple}"
    minimums = [nodes for nodes in range(1, last) if _is_valid_for(run, [nodes * nproc, last * nproc])]
    if minimums:
        nearest = min((nodes for nodes in minimums if nodes >= first), default=max(minimums))
        advice = f"use --nodes {nearest}:{last} (no batch of up to twice this one suits {first} and {last}: {reason})"
    else:
        advice = f"narrow --nodes: {reason}"
    return f"{advice}; or use --set layout=auto, which plans for the nodes that there are"


def _find_tokens_per_step(run: RunSpec, rank_counts: Sequence[int]) -> int | None:
    """Return the tokens per step that suit each number of ranks and are nearest to the run's; None if none are near."""
    training = run.training
    micro_batch = run.layout.micro_batch_size or 1
    dp_sizes = _dp_sizes(run, rank_counts)
    units = [micro_batch * lcm(*dp_sizes)]
    if run.layout.data_parallel in STRATEGIES_WITH_UNEVEN_BATCHES:
        units.append(micro_batch * max(dp_sizes))
    run_sequences = training.tokens_per_step // training.seq_len
    limit = MAX_BATCH_CHANGE * max(run_sequences, micro_batch * max(dp_sizes))
    for unit in units:
        multiples = sorted(range(unit, limit + 1, unit), key=lambda sequences: abs(sequences - run_sequences))
        for sequences in multiples[:MAX_TRIED_BATCHES]:
            tokens = sequences * training.seq_len
            if _is_valid_for(_replace_field(run, "training.tokens_per_step", tokens), rank_counts):
                return tokens
    return None


def _dp_sizes(run: RunSpec, rank_counts: Iterable[int]) -> list[int]:
    """Return the number of data-parallel ranks of each number of ranks that the layout divides."""
    sizes = []
    for ranks in rank_counts:
        try:
            sizes.append(parallel_dims(run.layout, ranks).dp_size)
        except UserError:
            continue
    return sizes


def _is_valid_for(run: RunSpec, rank_counts: Iterable[int]) -> bool:
    return all(layout_error(ResolvedRun(run, ranks)) is None for ranks in rank_counts)


def _replace_field(run: RunSpec, field: str, value: int) -> RunSpec:
    """Return the run with another value of a field of a table."""
    table, _, name = field.partition(".")
    return run.replace(**{table: getattr(run, table).replace(**{name: value})})
