"""`phalanx experts`: its table, and training after it has renumbered the experts of a run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.runs.checkpoints import find_damage
from phalanx.runs.metrics import read_metrics
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.callbacks.records import JsonLines
from phalanx.train.checkpoint.state import load_full_tensors
from phalanx.train.create_run import create_run
from tests.helpers import cli_runner
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_to_end, train_until

experts_output = partial(cli_runner.command_output, "experts")
experts_json = partial(cli_runner.command_json, "experts")
STOP_STEP, TOTAL_STEPS = 4, 8
TEXT = Path(json.__file__).parent


def moe_run(out: Path, **changes: Any) -> RunSpec:
    return small_run(TEXT, out, {"model": MOE, "training.steps": TOTAL_STEPS, "evaluation.every": STOP_STEP, **changes})


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """Return the directory of a run that was stopped halfway, after an evaluation."""
    return train_until_stop(tmp_path, STOP_STEP)


def train_until_stop(out: Path, eval_every: int) -> Path:
    """Train until a stop signal, with an evaluation every few steps, and return the run directory."""
    run = moe_run(out, **{"evaluation.every": eval_every})
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    trainer.stop_after_step = STOP_STEP
    train_to_end(trainer, {"metrics": JsonLines()})
    return trainer.directory


def resume_to_end(run: RunSpec) -> tuple[list[tuple[float, float]], list[list[int]]]:
    """Train the second half from the checkpoint; return losses and gradient norms, and the tokens of each expert."""
    trainer = make_trainer(run)
    assert trainer.resume()[0]
    losses = train_until(trainer, TOTAL_STEPS)
    trainer.experts.start_interval()
    return losses, trainer.evaluate()["expert_tokens"]


@pytest.mark.parametrize("changes", [{}, {"layout.ep": 2}, {"layout.ep": 2, "layout.data_parallel": "zero3"}], ids=str)
def test_resumed_training_is_unchanged_after_experts_are_reordered(changes: dict[str, Any], stopped_run: Path) -> None:
    """With a given or a balanced order, the model is the same, and each expert has its tokens under its new number."""
    reference, tokens = resume_to_end(moe_run(stopped_run.parent))
    expert_tokens = [record for record in read_metrics(stopped_run) if "expert_tokens" in record][-1]["expert_tokens"]
    table = experts_json(stopped_run, "--ep", 2, "--balance")
    assert [row["tokens"] for row in table["layers"]] == expert_tokens
    assert all(1 <= row["busiest_rank_after"] <= row["busiest_rank"] for row in table["layers"])
    renumbered = experts_json(stopped_run, "--ep", 2)
    assert [row["busiest_rank"] for row in renumbered["layers"]] == [
        row["busiest_rank_after"] for row in table["layers"]
    ]
    order = {"0": [3, 2, 1, 0], "1": [1, 2, 3, 0]}
    (stopped_run.parent / "order.json").write_text(json.dumps(order))
    experts_output(stopped_run, "--ep", 2, "--order", stopped_run.parent / "order.json")
    world_size = 4 if "layout.data_parallel" in changes else changes.get("layout.ep", 1)
    run = moe_run(stopped_run.parent, **changes)
    for losses, resumed_tokens in (
        rank_pool(world_size).run(resume_to_end, run) if world_size > 1 else [resume_to_end(run)]
    ):
        assert losses == [pytest.approx(step, rel=1e-10) for step in reference]
        for layer, row in enumerate(table["layers"]):
            assert resumed_tokens[layer] == [tokens[layer][row["order"][number]] for number in order[str(layer)]]


@pytest.mark.parametrize(
    ("every", "expected_steps"), [(STOP_STEP, TOTAL_STEPS - STOP_STEP), (TOTAL_STEPS, TOTAL_STEPS)]
)
def test_expert_token_counts_continue_after_resume(every: int, expected_steps: int, tmp_path: Path) -> None:
    """Tokens are counted since the last evaluation, which may be at the step of the stop."""
    _, tokens = resume_to_end(moe_run(train_until_stop(tmp_path, every).parent))
    assert [sum(layer) for layer in tokens] == [expected_steps * 8 * 32 * MOE["moe"]["top_k"]] * 2


def test_reorder_experts_permutes_only_expert_and_router_tensors(stopped_run: Path) -> None:
    (checkpoint,) = stopped_run.glob("checkpoints/step-*")
    before = load_full_tensors(checkpoint)
    order = stopped_run.parent / "order.json"
    order.write_text(json.dumps({"1": [3, 1, 0, 2]}))
    assert "step-00000004.before" in experts_output(stopped_run, "--ep", 4, "--order", order)
    after, backup = load_full_tensors(checkpoint), load_full_tensors(checkpoint.with_suffix(".before"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(torch.equal(before[name], backup[name]) for name in before)
    assert moved == {name for name in before if "blocks.1.mlp.experts" in name or "blocks.1.mlp.router" in name} - {
        name for name in before if "step" in name
    }
    assert all(torch.equal(before[name][[3, 1, 0, 2]], after[name]) for name in moved)
    assert find_damage(checkpoint) is None


def test_experts_prints_rank_load_table_without_changing_checkpoint(stopped_run: Path) -> None:
    text = experts_output(stopped_run, "--ep", 2)
    assert "busiest rank" in text
    assert "balanced" in text
    assert len([line for line in text.splitlines() if "|" in line]) == 2
    assert not list(stopped_run.glob("checkpoints/*.before"))


INVALID_ORDERS: list[tuple[list[str], str | None, str]] = [
    (["--ep", "3"], None, r"--ep = 3 does not divide model.moe.num_experts \(4\)"),
    (["--ep", "2", "--balance", "--order", "ORDER"], "{}", "cannot be combined with --balance"),
    (["--ep", "2", "--order", "ORDER"], None, "cannot be read"),
    (["--ep", "2", "--order", "ORDER"], "[1, 2]", "is not a JSON object"),
    (
        ["--ep", "2", "--order", "ORDER"],
        '{"7": [0, 1, 2, 3]}',
        "orders the experts of 7, which is not a layer with experts",
    ),
    (["--ep", "2", "--order", "ORDER"], '{"1": "3102"}', "does not contain each expert of layer 1 exactly once"),
    (
        ["--ep", "2", "--order", "ORDER"],
        '{"1": [1.9, 0.2, 2, 3]}',
        "does not contain each expert of layer 1 exactly once",
    ),
    (
        ["--ep", "2", "--order", "ORDER"],
        '{"1": [0, 0, 2, 3]}',
        "does not contain each expert of layer 1 exactly once",
    ),
]


@pytest.mark.parametrize(("arguments", "text", "problem"), INVALID_ORDERS)
def test_experts_rejects_invalid_order_before_writing(
    stopped_run: Path, arguments: list[str], text: str | None, problem: str
) -> None:
    order = stopped_run.parent / "order.json"
    if text is not None:
        order.write_text(text)
    with pytest.raises(UserError, match=problem):
        experts_output(stopped_run, *(order if word == "ORDER" else word for word in arguments))
    assert not list(stopped_run.glob("checkpoints/*.before"))


def test_experts_rejects_damaged_dense_or_missing_run(stopped_run: Path, tmp_path: Path) -> None:
    (checkpoint,) = stopped_run.glob("checkpoints/step-*")
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="has no intact checkpoint"):
        experts_output(stopped_run, "--ep", 2)
    dense = small_run(TEXT, tmp_path / "dense", {})
    create_run(dense, 1, resume=False)
    with pytest.raises(UserError, match="has a model without experts"):
        experts_output(tmp_path / "dense" / dense.name, "--ep", 2)
    grouped = {**MOE, "moe": {**MOE["moe"], "num_groups": 2, "top_groups": 1}}
    create_run(small_run(TEXT, tmp_path / "grouped", {"model": grouped}), 1, resume=False)
    with pytest.raises(UserError, match="num_groups = 2 chooses experts in groups"):
        experts_output(tmp_path / "grouped" / dense.name, "--ep", 2)
    with pytest.raises(UserError, match="does not exist"):
        experts_output(tmp_path / "nothing", "--ep", 2)
