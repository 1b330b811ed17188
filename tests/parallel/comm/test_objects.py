"""An error of one rank is raised on all of them, so that none waits."""

from __future__ import annotations

from functools import partial

import pytest

from phalanx.parallel.comm.objects import broadcast_from_rank0, gather_results, rank_and_world_size
from phalanx.spec.errors import UserError
from phalanx.testing import rank_pool


class TwoArgumentsError(Exception):
    """An error that can be pickled, but not read again."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url}: {status}")


def fail_on(failing_rank: int) -> str:
    rank = rank_and_world_size()[0]
    if rank == failing_rank:
        raise UserError("field", rank, "is wrong") if failing_rank else TwoArgumentsError("url", 403)
    return f"rank {rank}"


def messages_of_errors() -> list[str]:
    messages = []
    for call, failing_rank in ((broadcast_from_rank0, 0), (gather_results, 0), (gather_results, 1)):
        with pytest.raises((UserError, RuntimeError)) as caught:
            call(partial(fail_on, failing_rank))
        messages.append(str(caught.value))
    assert broadcast_from_rank0(lambda: fail_on(1)) == "rank 0"
    return [*messages, *gather_results(lambda: fail_on(2))]


def test_error_of_one_rank_is_raised_on_all() -> None:
    broken = "TwoArgumentsError: url: 403"
    expected = [broken, broken, "field = 1 is wrong", "rank 0", "rank 1"]
    assert rank_pool(2).run(messages_of_errors) == [expected, expected]
