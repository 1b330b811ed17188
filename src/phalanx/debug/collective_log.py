"""Comparison of the collectives that ranks recorded, and their description as text."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod

from phalanx.runs.hang_dumps import FAILED, Frame, HangDump, RecordedCollective, format_frame
from phalanx.spec.formatting import join_words

Key = tuple[str, tuple[int, ...]]
"""A process group: its name, which other groups on other ranks may share, and its ranks."""
Calls = dict[int, dict[int, RecordedCollective]]
"""The recorded collectives of a group by rank and by number."""

SAME_SIZE_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
"""Collectives with the same number of elements on every rank. In others, the number may differ."""
AUTOGRAD_FILE = "torch/autograd/graph.py"
"""The file on top of the stack during backward passes, and during waits in C++ hooks (DDP's)."""
PIPELINE_P2P_FILE = "/parallel/pipeline/p2p.py"
"""The file in which pipeline stages wait for each other's messages."""
CALL_LOG_FILE = "/train/guards/collective_log.py"
"""The file that calls every collective on behalf of its caller if the order of collectives is checked."""
PEER_LOSS_PATTERN = re.compile(
    "by peer|Broken pipe|Socket closed|Timed out|timing out|Read error|remote process exited|communicator was aborted|"
    "pair closure|connectFullMesh|likely closed|wait timeout|client socket has (timed out|failed)"
)
"""Error messages of gloo, NCCL and the store for a peer that is gone or late."""


def collectives_by_group(dumps: Mapping[int, HangDump]) -> dict[Key, Calls]:
    """Return the recorded collectives by group, in the order in which groups were used."""
    calls_by_group: dict[Key, Calls] = defaultdict(dict)
    for rank, dump in sorted(dumps.items()):
        for call in dump["calls"]:
            calls_by_group[group_key(dump, call)].setdefault(rank, {})[call["number"]] = call
        for name, ranks in dump["groups"].items():
            if rank in ranks:
                calls_by_group[name, tuple(ranks)].setdefault(rank, {})
    return dict(calls_by_group)


def group_key(dump: HangDump, call: RecordedCollective) -> Key:
    """Return the process group of a call in a dump."""
    return call["group"], tuple(dump["groups"].get(call["group"], ()))


def call_signature(call: RecordedCollective) -> tuple[Hashable, ...]:
    """Return the properties of a call that must be equal on all ranks."""
    operation = call["operation"]
    # NCCL's names are _all_gather_base and _reduce_scatter_base.
    if operation.lstrip("_").removesuffix("_base") not in SAME_SIZE_COLLECTIVES:
        return (operation,)
    return operation, tuple(prod(shape) for shape in call["inputs"]), tuple(call["dtypes"])


def minority_ranks(value_by_rank: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks whose value differs from the most frequent one, or all ranks in a tie."""
    counts = Counter(value_by_rank.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return list(value_by_rank)
    return [rank for rank, value in value_by_rank.items() if value != counts[0][0]]


def was_waiting(dump: HangDump) -> bool:
    """Return whether a rank waited for others, or failed because they were gone or late."""
    in_autograd = bool(dump["stack"]) and AUTOGRAD_FILE in dump["stack"][0][0]
    in_collective = in_autograd and any(not call["over"] for call in dump["calls"])
    return dump["waiting"] or in_collective or is_peer_loss(dump.get("error", ""))


def was_in_collective(dump: HangDump, call: RecordedCollective) -> bool:
    """Return whether a rank was in a collective.

    Gloo marks a failed collective as finished. A failed message implies nothing about the collectives before it."""
    failed = dump["why"] == FAILED and was_waiting(dump) and not was_in_pipeline_p2p(dump)
    return not call["over"] or (failed and call is dump["calls"][-1])


def was_in_pipeline_p2p(dump: HangDump) -> bool:
    """Return whether a rank waited for a message of another pipeline stage."""
    user_frame = next((frame for frame in dump["stack"] if is_user_code(frame[0])), None)
    return user_frame is not None and user_frame[0].endswith(PIPELINE_P2P_FILE)


def is_peer_loss(error: str) -> bool:
    """Return whether an error means that peers were gone or late."""
    return PEER_LOSS_PATTERN.search(error) is not None


def first_difference(calls: Calls, signature: Callable[[RecordedCollective], Hashable]) -> int | None:
    """Return the lowest number at which ranks have calls with different signatures, or None."""
    signature_by_number: dict[int, Hashable] = {}
    differing_numbers = []
    for rank_calls in calls.values():
        for number, call in rank_calls.items():
            if signature_by_number.setdefault(number, signature(call)) != signature(call):
                differing_numbers.append(number)
    return min(differing_numbers, default=None)


def describe_call(call: RecordedCollective) -> str:
    """Return a call as text, such as "all_reduce of [4] Float"."""
    shapes = join_words([str(shape) for shape in call["inputs"][:3]]) + (", ..." if len(call["inputs"]) > 3 else "")
    if call["operation"] == "barrier" or not call["inputs"]:
        return call["operation"]
    return f"{call['operation']} of {shapes} {call['dtypes'][0] if call['dtypes'] else ''}".rstrip()


def innermost_user_frame(stack: Sequence[Frame]) -> str:
    """Return the innermost frame of a stack outside of PyTorch and the standard library, as text."""
    user_frame = next((frame for frame in stack if is_user_code(frame[0])), None)
    return format_frame(user_frame or (stack[0] if stack else None))


def is_user_code(file: str) -> bool:
    """Return whether a file belongs neither to PyTorch, nor to Python, nor to the log of their calls."""
    is_library = "/torch/" in file or ("/lib/python3" in file and "site-packages" not in file)
    return not (is_library or file.startswith("<") or file.endswith(CALL_LOG_FILE))
