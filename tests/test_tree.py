"""Unit tests mirror the tree of src/phalanx: tests/plan/search/test_search.py tests plan/search/search.py."""

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "phalanx"
NOT_MIRRORED = {"integration", "parity", "benchmarks", "docs", "helpers", "null_gpu"}
"""Tests of several packages together, of layouts compared with one process, of benchmarks/ and docs/, of the CUDA
path (make test-null-gpu), and code that tests share."""


def module_of(test_file: Path) -> Path | None:
    """Return the module of a test file: test_<module>.py or test_<module>_<aspect>.py."""
    folder = PACKAGE / test_file.relative_to(TESTS).parent
    parts = test_file.stem.removeprefix("test_").split("_")
    names = ("_".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((folder / f"{name}.py" for name in names if (folder / f"{name}.py").exists()), None)


def test_unit_test_files_are_named_after_modules():
    files = [path for path in TESTS.rglob("test_*.py") if path.parent != TESTS]
    mirrored = [path for path in files if path.relative_to(TESTS).parts[0] not in NOT_MIRRORED]
    assert len(mirrored) > 100
    assert [path for path in mirrored if module_of(path) is None] == []


def test_module_of_rejects_file_of_no_module():
    assert module_of(TESTS / "plan" / "search" / "test_nothing.py") is None
