"""The layouts of `make test`: any two compatible choices are in one of them (a pairwise covering set). Pipeline
schedules of one kind count as one choice, and each schedule is in one layout.

python -m tests.parity.covering_set      # tries all combinations, and writes covering_set.json in fifteen seconds
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from pathlib import Path

from phalanx.schedule.published import PUBLISHED
from phalanx.spec.errors import UserError
from tests.helpers.covering import covering_subset
from tests.helpers.small_runs import DENSE, GPT2, MOE, Table, small_run
from tests.parity.fuzz import is_valid_layout

FILE = Path(__file__).with_suffix(".json")
MAX_RANKS = 4
FIXED_COST = 12
"""Cost of a layout in ranks, so that the set has few layouts as well as few ranks."""
Choices = Mapping[str, str]
"""The value of each factor."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors with their values, in the order of FACTORS; the value of a schedule is its kind."""

FACTORS: dict[str, tuple[str, ...]] = {
    "data": ("none", "ddp", "zero1", "zero2", "zero3", "hsdp", "parameter_server"),
    "tp": ("1", "2", "2, whole sequences"),
    "schedule": ("none", *PUBLISHED),
    "cp": ("none", "ring", "ulysses"),
    "ep": ("1", "2"),
    "recompute": ("none", "selective", "full"),
    "optimizer": ("adamw", "sgd", "muon"),
    "model": ("dense", "moe", "gpt2", "tied"),
    "batch": ("even", "uneven"),
    "offload": ("none", "cpu"),
}
SCHEDULE_KINDS = {
    "none": "none",
    **dict.fromkeys(("naive", "gpipe", "1f1b"), "one stage a rank"),
    **dict.fromkeys(("zb-h1", "zb-h2"), "split backward pass"),
    **dict.fromkeys(("interleaved", "zb-v", "dualpipe-v"), "two stages a rank"),
}
PAIRED = {**FACTORS, "schedule": tuple(dict.fromkeys(SCHEDULE_KINDS.values()))}
MODELS: dict[str, Table] = {
    "dense": DENSE,
    "moe": MOE,
    "gpt2": {**DENSE, **GPT2},
    "tied": {**DENSE, "tie_embeddings": True},
}
DATA_RANKS = {"none": 1, "hsdp": 4, "parameter_server": 3}
"""Data-parallel ranks of strategies that do not have two; hsdp has two replicas only if no other axis is split."""


def world_size(choices: Choices) -> int:
    """Return the number of ranks of a layout."""
    split_axes = sum([choices["tp"] != "1", choices["schedule"] != "none", choices["cp"] != "none"])
    data_ranks = DATA_RANKS.get(choices["data"], 2)
    return (2 if choices["data"] == "hsdp" and split_axes else data_ranks) * 2**split_axes


def run_changes(choices: Choices) -> Table:
    """Return the changes of a run file for these choices."""
    is_pipeline = choices["schedule"] != "none"
    even, uneven = (4, 5) if choices["data"] == "none" else (8, 7)
    sequences = even if choices["batch"] == "even" else uneven
    changes: Table = {
        "model": {**MODELS[choices["model"]], "num_layers": 4 if is_pipeline else 2},
        "training.tokens_per_step": sequences * 32,
        "optimizer.name": choices["optimizer"],
        "layout.data_parallel": "ddp" if choices["data"] == "none" else choices["data"],
        "layout.micro_batch_size": 1 if is_pipeline or sequences == uneven else 2,
        "layout.activation_checkpointing": choices["recompute"],
    }
    if choices["data"] == "hsdp":
        changes["layout.dp_shard"] = 2
    if choices["tp"] != "1":
        changes |= {"layout.tp": 2, "layout.sequence_parallel": choices["tp"] == "2"}
    if is_pipeline:
        changes |= {"layout.pp": 2, "layout.schedule": choices["schedule"]}
    if choices["schedule"] == "interleaved":
        changes["layout.virtual_stages"] = 2
    if choices["cp"] != "none":
        changes |= {"layout.cp": 2, "layout.cp_method": choices["cp"]}
    if choices["ep"] != "1":
        changes["layout.ep"] = 2
    if choices["offload"] != "none":
        changes["layout.offload"] = choices["offload"]
    return changes


def is_valid(choices: Choices, text: Path) -> bool:
    """Return whether Phalanx accepts a run with these choices."""
    try:
        run = small_run(text, text.parent, run_changes(choices))
    except UserError:
        return False
    return is_valid_layout(world_size(choices), run)


def pairs(choices: Choices) -> Iterator[Pair]:
    """Return all pairs of choices of a layout."""
    return combinations({**choices, "schedule": SCHEDULE_KINDS[choices["schedule"]]}.items(), 2)


def all_pairs() -> list[Pair]:
    """Return all pairs of values of two factors."""
    return [
        ((factor, value), (other, other_value))
        for factor, other in combinations(PAIRED, 2)
        for value in PAIRED[factor]
        for other_value in PAIRED[other]
    ]


def combinations_of_choices() -> Iterator[Choices]:
    """Yield all combinations that have at most MAX_RANKS ranks."""
    for values in product(*FACTORS.values()):
        choices = dict(zip(FACTORS, values, strict=True))
        if world_size(choices) <= MAX_RANKS:
            yield choices


def covering_set(valid: list[Choices]) -> list[Choices]:
    """Choose layouts until each pair of a valid one, and each schedule, is in one of them."""
    features = [[*pairs(choices), choices["schedule"]] for choices in valid]
    chosen = covering_subset(features, [FIXED_COST + world_size(choices) for choices in valid])
    return [valid[index] for index in chosen]


def main() -> None:
    """Write the set."""
    text = Path(json.__file__).parent
    chosen = covering_set([choices for choices in combinations_of_choices() if is_valid(choices, text)])
    FILE.write_text("[\n" + ",\n".join(json.dumps(dict(choices)) for choices in chosen) + "\n]\n")
    print(f"{len(chosen)} layouts in {FILE}")


if __name__ == "__main__":
    main()
