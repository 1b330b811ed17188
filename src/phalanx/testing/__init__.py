"""The pool of test ranks: prove a distributed function with one line.

    from phalanx.testing import ranks

    def total(value):                       # a top-level function of an importable module
        tensor = torch.tensor(value + dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.item()

    assert ranks(4).run(total, 10) == [46, 46, 46, 46]

`ranks(4)` starts four processes once; every later `run` reuses them, so a test costs milliseconds, not seconds.
"""

from phalanx.testing.failure import Failure, RanksFailed
from phalanx.testing.pool import Pool, ranks

__all__ = ["Failure", "Pool", "RanksFailed", "ranks"]
