"""`python -m tests.null_gpu.rank`: a rank of a run, phalanx.train's own, on the GPU that computes nothing."""

from __future__ import annotations

import faulthandler

from phalanx.train.__main__ import main
from tests.null_gpu.given_numbers import give_numbers

if __name__ == "__main__":
    faulthandler.enable()
    give_numbers()
    main()
