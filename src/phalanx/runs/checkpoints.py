"""Validation of checkpoints by manifest and checksums.

No torch: the command line uses this module before it spawns ranks.

    checkpoints/latest                   the name of the newest complete checkpoint
    checkpoints/step-00000100.before/    the previous content of a rewritten checkpoint (`phalanx experts`)
    checkpoints/step-00000100.damaged/   a quarantined checkpoint
    checkpoints/step-00000100.abandoned/ a checkpoint after the one to which `--resume --step N` went back
    checkpoints/step-00000100/
        shard-*.safetensors              parameters and optimizer state, in the format of DCP
        rank-*.json                      random state and checksums of each rank's files
        manifest.json                    step, tokens, loader state, model
        SHA256SUMS                       checksum of every file above; `sha256sum -c SHA256SUMS` checks them

A checkpoint is written to step-*.tmp, and renamed when all of it is on disk. The shards of a checkpoint with a file
objects.json are in an object store (`checkpoint_store`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from phalanx.runs.decode import Count, Finite, Number, WorldSize, check_regular_file, decoder, read_bytes, read_json
from phalanx.runs.stored_shards import (
    CHECKSUMS_FILE,
    OBJECTS_FILE,
    find_shard_damage,
    hide_stored,
    read_shards,
)
from phalanx.spec.base import Spec
from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import open_no_link
from phalanx.spec.model import KindSpec, ModelSpec, MoESpec
from phalanx.spec.run import KeepSpec, RunSpec
from phalanx.spec.tuning import AdapterSpec

logger = logging.getLogger(__name__)

CHECKPOINTS_DIR = "checkpoints"
FORMAT = "phalanx-checkpoint"
LATEST_FILE = "latest"
PREVIOUS_SUFFIX = ".before"
DAMAGED_SUFFIX = ".damaged"
ABANDONED_SUFFIX = ".abandoned"
NamedStep = int | Literal["best"] | None
"""The step of a checkpoint; "best" is the one with the lowest held-out loss, None the newest intact one."""
MAX_LISTED_STEPS = 12
"""Maximum number of steps that an error lists."""
SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "norm",
    "activation",
    "swiglu_alpha",
    "swiglu_limit",
    "silu_limit",
    "shared_silu_limit",
    "position_embedding",
    "bias",
    "qk_norm",
    "tie_embeddings",
    "attention_sinks",
    "attention_chunk",
    "layers",
    "kinds",
    "num_shared_kv_layers",
    "shared_kv_ffn_size",
    "per_layer_input_size",
    "norm_position",
    "norm_offset",
    "norm_parameters",
    "parallel_residual",
    "attention_scale",
    "attention_clip",
    "attention_gate",
    "attention_softcap",
    "query_temperature",
    "indexer",
    "values_from_keys",
    "value_norm",
    "value_head_dim",
    "value_scale",
    "side_mixer",
    "gate_scale",
    "up_scale",
    "layer_scalars",
    "embedding_scale",
    "embedding_norm",
    "residual_scale",
    "logits_divisor",
    "logits_softcap",
    "attention_bias",
    "mixer",
    "branches",
)
ADAPTER_FIELDS = ("rank", "alpha", "targets", "rslora", "dora", "base_dtype")
EXPERT_SHAPE_FIELDS = (
    "num_experts",
    "top_k",
    "expert_ffn_size",
    "num_shared_experts",
    "shared_ffn_size",
    "shared_gate",
    "bias",
    "choice_bias",
    "routed_scale",
    "weight_eps",
    "num_groups",
    "top_groups",
    "group_scores",
    "num_leading_dense_layers",
    "router_score",
    "bias_update_rate",
    "dense_branch",
    "latent_size",
    "router_norm",
    "expert_scales",
    "weighs_inputs",
    "normalize_top_k",
)
_CHECKPOINT_NAME = re.compile(r"step-(\d{8})")
_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


@with_config(ConfigDict(extra="allow"))
class _SavedModel(TypedDict):
    """The model in a manifest."""

    moe: dict[str, Any] | None


class _Rescaling(TypedDict):
    """The learning-rate scale in a manifest."""

    before: Number
    after: Number
    since: Count
    steps: Count


class SavedEvaluation(TypedDict):
    """The evaluation of a checkpoint's weights in a manifest."""

    held_out_loss: Finite
    held_out_set: str
    """Identifies the evaluated text (`EvaluationMetrics`)."""


@with_config(ConfigDict(extra="allow"))
class Manifest(TypedDict):
    """The state of a run in a checkpoint, besides its tensors."""

    format: Literal["phalanx-checkpoint"]
    """The value of `FORMAT`."""
    step: Count
    world_size: WorldSize
    tokens: Count
    targets: NotRequired[Count]
    skipped: Count
    loader: dict[str, Any]
    rescaling: _Rescaling
    model: _SavedModel
    optimizer: str
    implementations: NotRequired[dict[str, str | None]]
    adapter: NotRequired[dict[str, Any] | None]
    expert_tokens: NotRequired[tuple[list[list[Count]], list[list[Count]]]]
    """Tokens of each layer and expert: until now, and between the last two evaluations."""
    callbacks: NotRequired[dict[str, dict[str, Any]]]
    """States of callbacks by name."""
    evaluation: NotRequired[SavedEvaluation | None]
    """None if these weights were not evaluated, or their loss was not finite."""


_decode_manifest = decoder(Manifest)


def step_name(step: int) -> str:
    """Return the directory name of a checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written, from its directory name."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints(directory: Path, last_step: int | None = None) -> list[Path]:
    """Return the checkpoints in a directory up to `last_step`, newest first, without unfinished ones (.tmp)."""
    paths = [path for path in directory.glob("step-*") if _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in paths if last_step is None or step_of(path) <= last_step), reverse=True)


def sha256(path: Path) -> str:
    """Return the checksum of a file's content. Raises OSError if the file cannot be read."""
    check_regular_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(checkpoint: Path) -> str | None:
    """Return a description of the damage of a checkpoint, or None if all its checksums are correct."""
    try:
        checksums = read_checksums(checkpoint)
    except ValueError as problem:
        return str(problem)
    return find_damaged_files(checkpoint, checksums)


def read_checksums(checkpoint: Path) -> dict[str, str]:
    """Return the checksums of a checkpoint's files by file name.

    Raises ValueError if the checksum file cannot be read, or does not list exactly the files of the checkpoint.
    """
    try:
        lines = read_bytes(checkpoint / CHECKSUMS_FILE).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{CHECKSUMS_FILE} cannot be read ({error})") from None
    matches = [_CHECKSUM_LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not matches or not all(matches):
        raise ValueError(f"{CHECKSUMS_FILE} has an invalid format")
    checksums = {match[2]: match[1] for match in matches if match}
    stored = read_shards(checkpoint)
    present = {path.name for path in checkpoint.iterdir()} | {*(stored["shards"] if stored else ())}
    present -= {CHECKSUMS_FILE, OBJECTS_FILE}
    if present != set(checksums):
        raise ValueError(f"files differ from {CHECKSUMS_FILE}: {', '.join(sorted(present ^ set(checksums)))}")
    return checksums


def find_damaged_files(checkpoint: Path, checksums: Mapping[str, str]) -> str | None:
    """Return which files of a checkpoint do not have these checksums or cannot be read, or None.

    Files that are in an object store only are compared as `StoredShard.find_damage` does. Raises UserError if the store
    cannot be reached."""
    stored = read_shards(checkpoint)
    remote = [name for name in checksums if stored and name in stored["shards"] and not (checkpoint / name).exists()]
    local = [name for name in checksums if name not in remote]
    try:
        mismatched_files = [name for name in local if sha256(checkpoint / name) != checksums[name]]
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    if mismatched_files:
        return f"checksum of {', '.join(mismatched_files)} is wrong"
    return next((damage for name in remote if (damage := find_shard_damage(checkpoint, name)) is not None), None)


def latest_valid(directory: Path) -> tuple[Path | None, dict[str, str]]:
    """Return the newest undamaged checkpoint in a directory, and the damage of each newer one by name."""
    damaged: dict[str, str] = {}
    recover_interrupted_rewrites(directory)
    for checkpoint in checkpoints(directory):
        problem = find_damage(checkpoint)
        if problem is None:
            return checkpoint, damaged
        damaged[checkpoint.name] = problem
    return None, damaged


def recover_interrupted_rewrites(directory: Path) -> None:
    """Restore the old version of checkpoints whose rewrite was interrupted."""
    for backup in directory.glob(f"step-*{PREVIOUS_SUFFIX}"):
        if not backup.with_suffix("").exists():
            backup.rename(backup.with_suffix(""))


def parse_step(text: str) -> int | Literal["best"]:
    """Return the step that --step names. Raises ValueError if it names none."""
    if text != "best" and not text.isdecimal():
        raise ValueError(f"{text!r} is not a step")
    return "best" if text == "best" else int(text)


def split_checkpoint_path(path: Path, step: NamedStep = None) -> tuple[Path, NamedStep]:
    """Return the run directory and the step of RUN_DIR, or of RUN_DIR/checkpoints/step-N.

    Raises UserError if the path names another step than `step`.
    """
    match = re.fullmatch(r"step-(\d+)", path.name)
    if match is None or path.parent.name != CHECKPOINTS_DIR:
        return path, step
    if step not in (None, int(match[1])):
        raise UserError("--step", step, f"is not the step of {path}", fix=f"remove --step, or give {path.parents[1]}")
    return path.parents[1], int(match[1])


def require_valid_checkpoint(run_directory: Path, step: NamedStep = None) -> Path:
    """Return an undamaged checkpoint of a run: of a step, the best, or the newest.

    For the newest, it logs which damaged newer ones it skips. Raises UserError if there is no such checkpoint, or it
    is damaged.
    """
    directory = run_directory / CHECKPOINTS_DIR
    if step is not None:
        checkpoint = find_checkpoint(run_directory, step)
        if problem := find_damage(checkpoint):
            fix = f"restore it from a copy, or {_offer_steps(directory, step_of(checkpoint))}"
            raise UserError("checkpoint", str(checkpoint), f"is damaged: {problem}", fix)
        return checkpoint
    newest, damaged = latest_valid(directory)
    if newest is None:
        problem = f"has no intact checkpoint: {damaged}" if damaged else "has no checkpoint yet"
        raise UserError("run directory", str(run_directory), problem, fix="continue the run until its first checkpoint")
    for name, problem in damaged.items():
        logger.warning("checkpoint %s is damaged and was skipped: %s", name, problem)
    return newest


def saved_evaluation(record: Mapping[str, Any], step: int) -> SavedEvaluation | None:
    """Return what the manifest of a step records of an evaluation: None for one of another step, or without a loss."""
    if record.get("step") != step or not math.isfinite(record["held_out_loss"]):
        return None
    return {"held_out_loss": record["held_out_loss"], "held_out_set": record["held_out_set"]}


def checkpoints_to_keep(saved: list[Path], keep: KeepSpec) -> set[Path]:
    """Return which of these checkpoints, newest first, a run keeps."""
    kept = {*saved[: keep.last], *(path for path in saved if keep.every and step_of(path) % keep.every == 0)}
    return kept | set(best_checkpoints(saved)[: keep.best]) if keep.best else kept


def find_checkpoint(run_directory: Path, step: int | Literal["best"]) -> Path:
    """Return the checkpoint of a step, or the best, intact or not. Raises UserError if it does not exist."""
    directory = run_directory / CHECKPOINTS_DIR
    recover_interrupted_rewrites(directory)
    if step == "best":
        best = best_checkpoints(checkpoints(directory))
        if not best:
            problem = f"is unknown: no checkpoint of {run_directory} was evaluated"
            fix = f"{_offer_steps(directory)}, or set evaluation.every, so that new checkpoints are evaluated"
            raise UserError("--step", step, problem, fix)
        return best[0]
    checkpoint = directory / step_name(step)
    if not checkpoint.is_dir():
        aside = [path.name for path in sorted(directory.glob(f"{checkpoint.name}.*")) if path.suffix != ".tmp"]
        problem = f"is not a checkpoint of {run_directory}" + (f", which has {', '.join(aside)}" if aside else "")
        raise UserError("--step", step, problem, fix=_offer_steps(directory, step))
    return checkpoint


def _offer_steps(directory: Path, wanted: int | None = None) -> str:
    """Return a fix that lists the steps of the other checkpoints, of many those nearest to the wanted one."""
    steps = [step for step in map(step_of, checkpoints(directory)) if step != wanted]
    center = max(steps, default=0) if wanted is None else wanted
    nearest = sorted(sorted(steps, key=lambda step: abs(step - center))[:MAX_LISTED_STEPS])
    if not nearest:
        return "continue the run until its next checkpoint"
    total = f" (the nearest of {len(steps)})" if len(nearest) < len(steps) else ""
    return f"use one of {', '.join(map(str, nearest))}{total}"


def best_checkpoints(saved: Iterable[Path]) -> list[Path]:
    """Return the evaluated checkpoints among these, newest first, by held-out loss from the lowest.

    Only losses on the same text are comparable: checkpoints evaluated on another text than the newest are left out.
    """
    evaluated = []
    for checkpoint in saved:
        with suppress(UserError):
            if evaluation := read_manifest(checkpoint).get("evaluation"):
                evaluated.append((checkpoint, evaluation))
    same_text = [item for item in evaluated if item[1]["held_out_set"] == evaluated[0][1]["held_out_set"]]
    return [checkpoint for checkpoint, _ in sorted(same_text, key=lambda item: item[1]["held_out_loss"])]


def quarantine(directory: Path, damaged: Iterable[str], intact: Path | None, suffix: str = DAMAGED_SUFFIX) -> None:
    """Rename damaged checkpoints to step-N.damaged, and point `latest` to the intact one.

    Quarantined checkpoints of these names are replaced. Without an intact one, `latest` remains unchanged. In an object
    store, they become incomplete.
    """
    for name in damaged:
        hide_stored(directory / name)
        quarantine_path = directory / f"{name}{suffix}"
        if quarantine_path.exists():
            shutil.rmtree(quarantine_path)
        (directory / name).rename(quarantine_path)
    if intact is not None:
        _point_latest_to(intact)


def abandon_newer(run_directory: Path, step: int) -> None:
    """Rename the checkpoints after a step, from which the run continues, to step-N.abandoned."""
    directory = run_directory / CHECKPOINTS_DIR
    newer = [path.name for path in checkpoints(directory) if step_of(path) > step]
    quarantine(directory, newer, directory / step_name(step), ABANDONED_SUFFIX)
    if newer:
        text = "going back to step %d; newer checkpoints are renamed to *%s: %s"
        logger.info(text, step, ABANDONED_SUFFIX, ", ".join(newer))


def check_not_all_damaged(directory: Path) -> None:
    """Raise UserError if a run without an intact checkpoint has quarantined ones.

    A temporary disk failure must not make the run start over from step 0.
    """
    quarantined = sorted(path.name for path in directory.glob(f"*{DAMAGED_SUFFIX}"))
    if quarantined:
        problem = f"has no intact checkpoint: {', '.join(quarantined)}"
        fix = (
            "check the disk. To reuse a checkpoint, remove the .damaged suffix; "
            "to start over, delete the checkpoints or choose another run name"
        )
        raise UserError("run directory", str(directory.parent), problem, fix)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises UserError if Phalanx did not write the checkpoint."""
    path = checkpoint / "manifest.json"
    try:
        return read_json(path, _decode_manifest)
    except (OSError, ValueError):
        problem = "is not a Phalanx checkpoint: it has no Phalanx manifest.json"
        fix = "use a run directory of Phalanx; to start from Hugging Face weights, set model.from_hf"
        raise UserError("checkpoint", str(checkpoint), problem, fix=fix) from None


def write_synced(path: Path, text: str) -> None:
    """Write a text file and flush it to disk; a link in its place is replaced, not followed."""
    path.unlink(missing_ok=True)
    with open(path, "x", encoding="utf-8", opener=open_no_link) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(unfinished: Path, checksums: dict[str, str]) -> Path:
    """Turn a complete step-*.tmp into a checkpoint: write checksums (SHA-256 by file name), rename, update `latest`.

    An existing checkpoint of that step is renamed to step-*.before.
    """
    lines = [f"{digest}  {name}\n" for name, digest in sorted(checksums.items())]
    write_synced(unfinished / CHECKSUMS_FILE, "".join(lines))
    sync(unfinished)
    final = unfinished.with_suffix("")
    backup = unfinished.with_suffix(PREVIOUS_SUFFIX)
    if final.exists():
        shutil.rmtree(backup, ignore_errors=True)
        final.rename(backup)
    unfinished.rename(final)
    sync(final.parent)
    _point_latest_to(final)
    return final


def _point_latest_to(checkpoint: Path) -> None:
    """Point `latest` to a checkpoint."""
    latest = checkpoint.parent / f"{LATEST_FILE}.tmp"
    write_synced(latest, checkpoint.name + "\n")
    latest.rename(checkpoint.parent / LATEST_FILE)
    sync(checkpoint.parent)


def implementations(run: RunSpec) -> dict[str, str | None]:
    """Return the import paths of the user's model and optimizer by field, which a checkpoint's tensors depend on."""
    return {
        f"{table}.implementation": spec.implementation.class_path if spec.implementation else None
        for table, spec in (("model", run.model), ("optimizer", run.optimizer))
    }


def adapter_table(run: RunSpec) -> dict[str, Any] | None:
    """Return the adapters of a run as in a manifest; None without adapters."""
    return run.adapter.model_dump(mode="json", include=set(ADAPTER_FIELDS)) if run.adapter else None


def check_manifest(run: RunSpec, manifest: dict[str, Any]) -> None:
    """Raise UserError if a checkpoint has another model or component than `run`, or a step after its last."""
    if run.training.steps < manifest["step"]:
        problem = f"is less than the {manifest['step']} completed steps of the run"
        fix = "increase training.steps, or start a new run"
        raise UserError("training.steps", run.training.steps, problem, fix=fix)
    current_model = run.model.model_dump(mode="json")
    current_moe = current_model["moe"] or {}
    # Older checkpoints lack fields that came later.
    saved_model = _defaults(ModelSpec) | manifest["model"]
    saved_model["kinds"] = [_defaults(KindSpec) | kind for kind in saved_model["kinds"]]
    saved_moe = _defaults(MoESpec) | saved_model["moe"] if saved_model["moe"] else {}
    pairs = [(f"model.{name}", saved_model[name], current_model[name]) for name in SHAPE_FIELDS]
    saved_mtp, current_mtp = (table["mtp"] or {} for table in (saved_model, current_model))
    pairs += [(f"model.mtp.{name}", saved_mtp.get(name), current_mtp.get(name)) for name in ("layers", "kind")]
    pairs += [(f"model.moe.{name}", saved_moe.get(name), current_moe.get(name)) for name in EXPERT_SHAPE_FIELDS]
    saved_paths = manifest.get("implementations", {})
    pairs += [(field, saved_paths.get(field), path) for field, path in implementations(run).items()]
    saved_adapter = _defaults(AdapterSpec) | manifest["adapter"] if manifest.get("adapter") else {}
    current_adapter = adapter_table(run) or {}
    pairs += [(f"adapter.{name}", saved_adapter.get(name), current_adapter.get(name)) for name in ADAPTER_FIELDS]
    for field, saved, configured in pairs:
        if saved != configured:
            fix = "resume with the checkpoint's value, or start a new run"
            raise UserError(field, configured, f"differs from the checkpoint's value {saved!r}", fix=fix)


def _defaults(spec_class: type[Spec]) -> dict[str, Any]:
    """Return the defaults of a table's optional fields, as in a manifest."""
    optional = {name: field.default for name, field in spec_class.model_fields.items() if not field.is_required()}
    return dict(to_jsonable_python(optional))
