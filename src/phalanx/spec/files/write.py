"""TOML file of a run, which loads into the same run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import tomli_w

from phalanx.spec.files.hub import TOKENIZER_FILE, hub_name, pin_revision
from phalanx.spec.files.load import cluster_overrides
from phalanx.spec.local_paths import is_url
from phalanx.spec.run import RunSpec


def with_absolute_paths(run: RunSpec) -> RunSpec:
    """Return the run with paths that are valid from any working directory, and models on the hub with their commits."""

    def absolute_path(source: str) -> str:
        if source == "stdlib" or is_url(source):
            return source
        if source.startswith("hf:"):
            name, colon, parts = source[3:].partition(":")
            folder = absolute_path(name)
            return f"hf:{folder}{colon}{parts}" if os.path.isdir(folder) else source
        path = os.path.expanduser(source)
        normalized = os.path.abspath(path)
        # In "link/..", dropping ".." and the link before it would give another directory.
        is_same = os.path.realpath(normalized) == os.path.realpath(path)
        return normalized if is_same else str(Path(path).absolute())

    data = run.data
    tokenizer = data.tokenizer
    if hub_name(tokenizer):
        tokenizer = pin_revision("data.tokenizer", tokenizer, TOKENIZER_FILE)
    elif tokenizer not in ("bpe", "bytes"):
        tokenizer = absolute_path(tokenizer)
    lists = {
        "train": [absolute_path(source) for source in data.train],
        "source": [source.replace(path=[absolute_path(path) for path in source.path]) for source in data.source],
        "held_out": [absolute_path(source) for source in data.held_out],
        "held_out_sets": {name: list(map(absolute_path, sources)) for name, sources in data.held_out_sets.items()},
    }
    model = run.model
    if hub_name(model.from_hf or ""):
        model = model.replace(from_hf=pin_revision("model.from_hf", str(model.from_hf)))
    elif model.from_hf:
        model = model.replace(from_hf=absolute_path(model.from_hf))
    path_fields = ("offload_directory", "schedule_file")
    files = {field: absolute_path(value) for field in path_fields if (value := getattr(run.layout, field)) is not None}
    distillation = run.distillation
    if distillation is not None:
        distillation = distillation.replace(teacher=absolute_path(distillation.teacher))
    data = data.replace(tokenizer=tokenizer, cache=absolute_path(data.cache), **lists)
    layout = run.layout.replace(**files)
    changes = {"data": data, "model": model, "layout": layout, "distillation": distillation}
    return run.replace(output_dir=absolute_path(run.output_dir), **changes)


def to_toml(run: RunSpec, omitted: Iterable[str] = ()) -> str:
    """Return a run as the text of a TOML file that loads into the same run.

    For a machine with a preset, only the differences are written, so that another machine can replace it. Fields in
    `omitted`, such as "training.steps", are unset in the run and remain so.
    """
    table = run.model_dump(mode="json", exclude_none=True)
    if not run.callbacks:
        del table["callbacks"]
    if run.model.from_hf and "muon_learning_rate" not in run.optimizer.model_fields_set:
        del table["optimizer"]["muon_learning_rate"]  # its default is for new weights
    training = table["training"]
    if not run.training.has_decided_steps:
        del training["steps"]
    if training.pop("auto_precision"):
        training["precision"] = "auto"
    if table["layout"].pop("auto_checkpointing"):
        table["layout"]["activation_checkpointing"] = "auto"
    for field in omitted:
        section, _, name = field.partition(".")
        del table[section][name]
    return tomli_w.dumps({**table, "cluster": cluster_overrides(run.cluster)})
