"""Fixtures of all tests.

Tests share two cores with the ranks of the pool: this process computes with one thread, and examples have no
deadline. Fixtures import slow packages (numpy, torch) when a test asks for them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from phalanx.spec.log import log_to_stderr

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.data.indexed_dataset import IndexedDataset
    from tests.helpers.random_models import ModelBuilder

pytest.register_assert_rewrite("tests.helpers")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PHALANX_CHECK_COLLECTIVES", "1")  # in ranks of the pool, and of runs
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # names of the hub are found on stubs only
paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # ranks find no module in the working directory
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
log_to_stderr()  # as in commands and ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run what tests/thorough.tsv lists (make test-all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that only `make test-all` runs."""
    if not config.getoption("all"):
        from tests.helpers.tiers import thorough_items

        left_out = thorough_items(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def text() -> Path:
    """Return a directory of Python files: the standard library's json."""
    return Path(json.__file__).parent


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the same text in parts, so that documents end inside sequences."""
    from tests.helpers.small_runs import write_documents

    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder)
    return folder


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[[Sequence[Sequence[int]]], IndexedDataset]:
    """Write documents of token ids as a dataset."""
    import numpy as np

    from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter

    def write(documents: Sequence[Sequence[int]]) -> IndexedDataset:
        with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
            for ids in documents:
                writer.add(np.array(ids, np.int64))
        return IndexedDataset(tmp_path / "tokens")

    return write


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a directory of forty Python-like files in two folders, and of files that are not text."""
    root = tmp_path / "corpus"
    for number in range(40):
        file = root / f"part{number % 2}" / f"file{number:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def function_{number}(x):\n    return x + {number}\n" * (number % 7 + 1))
    (root / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (root / ".hidden").write_text("not read")
    return root


@pytest.fixture(scope="session")
def build_model() -> ModelBuilder:
    """Return a small model with random parameters, from its spec or from changes of random_models.SMALL_MODEL."""
    from tests.helpers import random_models

    return random_models.build_model


@pytest.fixture
def tokens() -> Tensor:
    """Return [2, 24] ids below the vocabulary of random_models.SMALL_MODEL."""
    import torch

    from tests.helpers.random_models import SMALL_MODEL

    return torch.randint(0, SMALL_MODEL["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def h100(tmp_path: Path) -> Path:
    """Return the root of a snapshot of a healthy node of eight H100."""
    from tests.helpers.h100_snapshot import write_h100_snapshot

    write_h100_snapshot(tmp_path / "h100")
    return tmp_path / "h100"


@pytest.fixture(scope="session")
def hybrid_facts() -> dict[str, Any]:
    """Return the facts that `phalanx report` computes from trained_runs.hybrid_run."""
    from phalanx.report.facts import report_facts
    from phalanx.report.run_data import read_run
    from tests.helpers.trained_runs import hybrid_run

    return report_facts(read_run(hybrid_run()))
