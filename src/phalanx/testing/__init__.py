"""Pool of test ranks: test a distributed function with one line.

    from phalanx.testing import rank_pool

    def total(value):                       # a top-level function of an importable module
        tensor = torch.tensor(value + dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.item()

    assert rank_pool(4).run(total, 10) == [46, 46, 46, 46]

The four processes start once and every later `run` reuses them: it takes a tenth of a second, not five."""

from phalanx.testing.rank_failure import RankError, RankFailure
from phalanx.testing.rank_pool import RankPool, rank_pool

__all__ = ["RankError", "RankFailure", "RankPool", "rank_pool"]
