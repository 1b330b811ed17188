"""Custom components passed from Python as import paths, tables and objects, in one run of the example."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.api.components import with_components
from phalanx.spec.errors import UserError
from tests.helpers.small_runs import find_examples

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_of_example(folder: Path) -> phalanx.RunSpec:
    return phalanx.run_from_table(
        {
            "name": "own",
            "output_dir": str(folder),
            "model": {"preset": "tiny", "hidden_size": 24, "num_heads": 2, "vocab_size": 257},
            "data": {
                "train": [str(Path(json.__file__).parent)],
                "held_out": [str(Path(tomllib.__file__).parent)],
                "tokenizer": "bytes",
                "mask_documents": False,
                "cache": str(folder),
            },
            "training": {"steps": 3, "seq_len": 32, "tokens_per_step": 256, "precision": "fp32"},
            "evaluation": {"every": 1, "tokens": 256},
        }
    )


def test_train_run_accepts_own_components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_examples()
    import own_parts

    monkeypatch.chdir(EXAMPLES)
    parts: dict[str, Any] = {
        "model": own_parts.Recurrent,
        "loss": {"class": "own_parts:smoothed", "smoothing": 0.2},
        "optimizer": "own_parts:Lion",
        "lr_schedule": own_parts.staircase,
        "data": own_parts.Counting,
        "callbacks": {"stop": {"class": "stop_early:StopEarly", "patience": 9}},
    }
    result = phalanx.train_run(run_of_example(tmp_path), nproc=2, quiet=True, **parts)
    assert (result.exit_reason, result.metrics["step"]) == ("finished", 3)
    recorded = phalanx.load_run(result.run_dir / "run.toml")
    assert recorded.model.implementation is not None
    assert recorded.model.implementation.class_path == "own_parts:Recurrent"
    assert recorded.callbacks["stop"].arguments == {"patience": 9}
    with pytest.raises(UserError, match=r"model\.implementation.* is code that only the run directory"):
        phalanx.load_model(result.run_dir)
    model, _ = phalanx.load_model(result.run_dir, trust=True)
    assert type(model).__name__ == "Recurrent"
    resumed = phalanx.train_run(result.run_dir, nproc=2, resume=True, trust=True, quiet=True)
    assert (resumed.exit_reason, resumed.metrics["step"]) == ("finished", 3)


def local_function() -> Callable[..., Any]:
    def inner() -> None:
        pass

    return inner


def test_with_components_refuses_object_that_ranks_cannot_import(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training\.loss = '.*inner'.*cannot be imported by the ranks"):
        with_components(run_of_example(tmp_path), {"loss": local_function()})
    with pytest.raises(UserError, match=r"training\.loss.*has no effect on a run directory"):
        with_components(tmp_path, {"loss": "a:b"})
    with pytest.raises(UserError, match=r"loss = .*partial.*cannot be imported by the ranks"):
        with_components(run_of_example(tmp_path), {"loss": partial(max, 1)})
    with pytest.raises(UserError, match=r"optimiser is not a component\n  fix: did you mean 'optimizer'"):
        with_components(run_of_example(tmp_path), {"optimiser": "a:b"})  # type: ignore[typeddict-unknown-key]
    run = run_of_example(tmp_path)
    assert with_components(run, {}) is run
