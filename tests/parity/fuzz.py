"""Random valid layouts, each compared with one process like the rows of the table.

python -m tests.parity.fuzz --count 50 --seed 1      # prints a line for each; exits with 1 if one differs
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import model_table
from phalanx.spec.layout import SHARDED_STRATEGIES, VALID_DATA_STRATEGIES, Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, GPT2, MODELS_OF_KINDS, MOE, Table, small_run, train_and_evaluate
from tests.model.huggingface.test_checkpoint_traps import KINDS as SMALL_CONFIGS

STEPS = 5
TOLERANCE = 1e-10
MODELS: dict[str, Table] = {
    "dense": DENSE,
    "moe": MOE,
    "six-experts": {**MOE, "moe": {**MOE["moe"], "num_experts": 6}},
    "gpt2": {**DENSE, **GPT2},
    "tied": {**DENSE, "tie_embeddings": True},
    "windows": {**DENSE, "sliding_window": 12, "full_attention_layers": [0, 3], "attention_sinks": True},
    **MODELS_OF_KINDS,
    "caps": {**DENSE, "attention_softcap": 2.0, "logits_softcap": 1.5},
    "three-heads": {**DENSE, "hidden_size": 24, "num_heads": 3, "num_kv_heads": 3},
}
WORLD_SIZES = (2, 3, 4, 4, 4, 5, 6, 8)
DEGREES = {"pp": (2, 3, 4, 5, 8), "tp": (2, 3, 4), "cp": (2, 3, 4), "ep": (2, 3, 4)}
"""Degrees above 1 that are drawn."""
UNDRAWN: dict[tuple[str, Any], str] = {
    ("gradient_compression", "bf16"): "rounds gradients",
    ("gradient_compression", "powersgd"): "approximates gradients",
    ("auto_checkpointing", True): "the planner replaces it before a run starts",
}
"""Values of choices of a layout that are not drawn, and the reason."""


def layout_choices() -> dict[str, tuple[Any, ...]]:
    """Return the values of each field of a layout that is a choice, and that are drawn."""
    values = {
        name: (False, True) if field.annotation is bool else get_args(field.annotation)
        for name, field in Layout.model_fields.items()
        if field.annotation is bool or get_origin(field.annotation) is Literal
    }
    return {name: tuple(value for value in choices if (name, value) not in UNDRAWN) for name, choices in values.items()}


CHOICES = layout_choices()


def draw_layout(dice: random.Random) -> tuple[int, str, int, Table]:
    """Return ranks, a model, its layers, and what to change in the run file; they may not fit each other."""
    world_size = dice.choice(WORLD_SIZES)
    degrees = draw_degrees(dice, world_size)
    layout: Table = {**degrees, "data_parallel": dice.choice(CHOICES["data_parallel"])}
    draw_recomputation(dice, layout)
    if degrees["pp"] > 1:
        layout["schedule"] = dice.choice(CHOICES["schedule"])
        layout["rank_order"] = dice.choice(CHOICES["rank_order"])
        layout["virtual_stages"] = 2 if layout["schedule"] == "interleaved" else 1
    if degrees["tp"] > 1:
        layout["sequence_parallel"] = dice.choice(CHOICES["sequence_parallel"])
        layout["tp_attention"] = dice.choice(CHOICES["tp_attention"])
    if degrees["cp"] > 1:
        layout["cp_method"] = dice.choice(CHOICES["cp_method"])
    draw_data_parallelism(dice, layout)
    layout["micro_batch_size"] = dice.choice([1, 1, 1, 2] if degrees["pp"] > 1 else [1, 2, 4])
    changes = {f"layout.{name}": value for name, value in layout.items() if value is not None}
    changes["optimizer.name"] = dice.choice(["adamw", "adamw", "sgd", "muon"])
    changes["training.seq_len"] = seq_len = 48 if 3 in (degrees["tp"], degrees["cp"]) else 32
    changes["training.tokens_per_step"] = dice.choice([8, 8, 7, 12, 24]) * seq_len
    return world_size, draw_model(dice, layout), dice.choice([4, 6, 8, 10] if degrees["pp"] > 1 else [2, 4]), changes


def draw_model(dice: random.Random, layout: Table) -> str:
    """Return a model whose experts and heads the ranks can mostly share."""
    if layout["tp"] == 3 or (layout.get("tp_attention") == "gathered" and layout["ep"] == 1):
        return "three-heads"
    experts = {2: ["moe", "six-experts"], 3: ["six-experts"], 4: ["moe"]}
    return dice.choice(experts.get(layout["ep"], list(MODELS)))


def draw_degrees(dice: random.Random, world_size: int) -> dict[str, int]:
    """Return degrees that divide the ranks; those of experts are ranks of any other kind."""
    left, degrees = world_size, dict[str, int]()
    for axis in ("pp", "tp", "cp"):
        degrees[axis] = dice.choice([1, 1, *(size for size in DEGREES[axis] if left % size == 0)])
        left //= degrees[axis]
    inside = world_size // degrees["pp"]
    degrees["ep"] = dice.choice([1, 1, 1, *(size for size in DEGREES["ep"] if inside % size == 0)])
    return degrees


def draw_recomputation(dice: random.Random, layout: Table) -> None:
    """Draw what is recomputed, and in how many blocks."""
    method = layout["activation_checkpointing"] = dice.choice(["none", *CHOICES["activation_checkpointing"]])
    if method != "none":
        by_rank = [dice.choice([0, 1, 2]) for _ in range(layout["pp"])]
        layout["recomputed_blocks"] = dice.choice([None, None, 1, by_rank])


def draw_data_parallelism(dice: random.Random, layout: Table) -> None:
    """Draw the options of the strategy."""
    strategy = layout["data_parallel"]
    for name, strategies in VALID_DATA_STRATEGIES.items():
        is_in_pipeline = layout["pp"] > 1 and name.startswith(("ddp_", "reshard"))
        if name in CHOICES and strategy in strategies and not is_in_pipeline:
            layout[name] = dice.choice([Layout.model_fields[name].default, *CHOICES[name]])
    if strategy == "hsdp":
        layout["dp_shard"] = dice.choice([2, 3])
    if strategy in ("zero3", "hsdp"):
        layout["fsdp_prefetch"] = dice.choice([0, 1, 2])
    if strategy == "parameter_server":
        layout["num_servers"] = dice.choice([1, 2])
    if strategy in ("ddp", "zero1", "zero2"):
        layout["bucket_mb"] = dice.choice([0.01, 25.0])
    if strategy in SHARDED_STRATEGIES and layout["offload"] == "nvme":
        layout["offload_directory"] = tempfile.gettempdir()


def is_valid_layout(world_size: int, run: RunSpec) -> bool:
    """Return whether training accepts the layout."""
    try:
        check_layout(ResolvedRun(run, world_size))
    except UserError:
        return False
    return True


def check_values(changes: Table) -> None:
    """Raise ValueError for a value that its own field does not accept: no other values would make it valid."""
    for key, value in changes.items():
        try:
            type_of_field(key).validate_json(json.dumps(value), strict=True)
        except (KeyError, ValidationError) as error:
            raise ValueError(f"{key} = {value} is drawn, but is never valid: {error!r}") from None


@cache
def type_of_field(key: str) -> TypeAdapter[Any]:
    """Return the type of a field of a run ("section.name"), with its bounds."""
    section, _, name = key.partition(".")
    field = RunSpec.model_fields[section].annotation.model_fields[name]  # type: ignore[union-attr]
    return TypeAdapter(Annotated[field.annotation, field])


def draw_valid_layouts(
    seed: int, count: int, text: Path, only_model: str | None = None
) -> list[tuple[int, str, int, Table]]:
    """Return this many layouts that training accepts, all of one model or each of a drawn one.

    Raises:
        ValueError: A value that no combination of the others would make valid.
    """
    dice = random.Random(f"{seed} {only_model}" if only_model else seed)
    layouts: list[tuple[int, str, int, Table]] = []
    while len(layouts) < count:
        world_size, model, layers, changes = draw_layout(dice)
        model = only_model or model
        drawn = (world_size, model, layers, changes)
        check_values(changes)
        try:
            run = small_run(text, text.parent, run_settings(model, layers, changes))
        except UserError:
            continue
        if is_valid_layout(world_size, run):
            layouts.append(drawn)
    return layouts


def run_settings(model: str, layers: int, changes: Table) -> Table:
    """Return the changes of a run with its model."""
    table = MODELS[model] if model in MODELS else family_model(model)
    return {"model": {**table, "num_layers": layers}, "training.steps": STEPS, **changes}


@cache
def family_model(kind: str) -> Table:
    """Return a small model of a Hugging Face family."""
    return model_table({**SMALL_CONFIGS[kind], "model_type": kind, "vocab_size": 257})


@cache
def single_process_trajectory(
    text: Path, model: str, layers: int, changes: tuple[tuple[str, Any], ...]
) -> list[tuple[float, float]]:
    """Return one process's losses and norms."""
    return train_and_evaluate(small_run(text, Path(tempfile.mkdtemp()), run_settings(model, layers, dict(changes))))


def max_relative_difference(text: Path, world_size: int, model: str, layers: int, changes: Table) -> float:
    """Return the largest relative difference of a loss or norm from one process's, over ranks and steps."""
    shared = {key: value for key, value in changes.items() if not key.startswith("layout.")}
    expected = single_process_trajectory(text, model, layers, tuple(sorted(shared.items())))
    run = small_run(text, Path(tempfile.mkdtemp()), run_settings(model, layers, changes))
    results = rank_pool(world_size).run(train_and_evaluate, run, timeout=300)
    return max(
        abs(actual - reference) / abs(reference)
        for result in results
        for step, expected_step in zip(result, expected, strict=True)
        for actual, reference in zip(step, expected_step, strict=True)
    )


def main() -> None:
    """Draw layouts, train them, and print the results."""
    parser = argparse.ArgumentParser("tests.parity.fuzz")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="*", help="draw that many layouts of each family of Hugging Face models")
    arguments = parser.parse_args()
    text, num_wrong = Path(json.__file__).parent, 0
    models = [None] if arguments.families is None else arguments.families or sorted(SMALL_CONFIGS)
    drawn = [layout for model in models for layout in draw_valid_layouts(arguments.seed, arguments.count, text, model)]
    for world_size, model, layers, changes in drawn:
        try:
            worst = max_relative_difference(text, world_size, model, layers, changes)
            outcome = f"{worst:.1e}"
        except Exception as error:  # a layout that ends in an error is a finding like any other
            worst, outcome = float("inf"), f"{type(error).__name__}: {str(error)[-600:]}"
        num_wrong += worst > TOLERANCE
        settings = " ".join(f"{key.partition('.')[2]}={value}" for key, value in changes.items())
        print(
            f"{'ok ' if worst <= TOLERANCE else 'BAD'} {outcome} x{world_size} {model}-{layers} {settings}", flush=True
        )
    print(f"{len(drawn) - num_wrong} of {len(drawn)} layouts of seed {arguments.seed} within {TOLERANCE:g}")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
