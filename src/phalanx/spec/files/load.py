"""From a TOML file, the environment and the command line to a RunSpec: defaults < file < environment < --set."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from phalanx.spec.base import did_you_mean, parse_table
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError, UserErrorGroup
from phalanx.spec.files.hf_config import model_table
from phalanx.spec.layout import REQUIRES_DEGREE, VALID_DATA_STRATEGIES, Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import OptimizerSpec, RunSpec

ENVIRONMENT_PREFIX = "PHALANX_"
JOB_ENVIRONMENT_VARIABLES = (
    "nodes",
    "nproc_per_node",
    "price_per_device_hour",
    "price_per_kwh",
    "storage_bytes_per_second",
    "failures_per_device_hour",
    "restart_seconds",
)
"""Of a cluster, what says nothing of the machine that it is made of."""
LAYOUT_FILE = "layout.json"
"""In a run directory: the layout of its last start, where that had other ranks than the run was meant for."""
Table = dict[str, Any]


def load_run(
    path: str | Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    machine: str | None = None,
) -> RunSpec:
    """Read a run file, or a Hugging Face config.json as a run of that model; `overrides` are the --set arguments, such
    as "training.steps=200". A value that is left out ("layout.dp_shard=") is the default. Another `machine` takes the
    place of the one that the file names.

    Raises UserError that names the field, its value and the fix.
    """
    is_hf_config = Path(path).suffix == ".json"
    table = {"model": {"from_hf": str(path)}} if is_hf_config else read_toml(path)
    if machine is not None and isinstance(cluster := table.get("cluster", {}), dict):
        kept_fields = [field for field in cluster if "preset" not in cluster or field in JOB_ENVIRONMENT_VARIABLES]
        table["cluster"] = {**{field: cluster[field] for field in kept_fields}, "preset": machine}
    file_layout = dict(layout) if isinstance(layout := table.get("layout", {}), dict) else {}
    variable_of_field = {}
    for name, text in sorted(environment.items()):
        _check_variable_name(name, text)
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            variable_of_field[".".join(keys)] = name
            _set_path(table, keys, text, origin=name)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise UserError("--set", override, "is not KEY=VALUE", fix="write, for example, --set training.steps=200")
        variable_of_field.pop(key.strip(), None)
        _set_path(table, key.strip().split("."), text.strip(), origin=f"--set {key}")
    _drop_inapplicable_options(table.get("layout", {}), file_layout)
    try:
        return run_from_table(table)
    except UserError as error:
        for user_error in error.errors if isinstance(error, UserErrorGroup) else [error]:
            if user_error.field in variable_of_field:
                user_error.problem += f" (set by {variable_of_field[user_error.field]})"
        raise


def _check_variable_name(name: str, text: str) -> None:
    """Raise UserError for a variable that names a field, but for an underscore between it and its section."""
    key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
    for section in RunSpec.model_fields if name.startswith(ENVIRONMENT_PREFIX) and "__" not in name else ():
        field = key.removeprefix(f"{section}_")
        if field in getattr(RunSpec.model_fields[section].annotation, "model_fields", ()):
            problem = "is not read: two underscores stand between a section and its field"
            fix = f"write {ENVIRONMENT_PREFIX}{section.upper()}__{field.upper()}, or unset it"
            raise UserError(name, text, problem, fix=fix)


def _drop_inapplicable_options(layout: Any, file_layout: Table) -> None:
    """Another strategy than the run file's, or a degree set back to 1, leaves behind those of its choices that mean
    nothing now."""
    if not isinstance(layout, dict):
        return
    unchanged_fields = [field for field in file_layout if layout.get(field) == file_layout[field]]
    if layout.get("data_parallel") != file_layout.get("data_parallel"):
        strategy = str(layout.get("data_parallel", Layout.model_fields["data_parallel"].default))
        for field in unchanged_fields:
            if strategy not in VALID_DATA_STRATEGIES.get(field, (strategy,)):
                del layout[field]
    for field, axis in REQUIRES_DEGREE.items():
        if field in unchanged_fields and layout.get(axis, 1) == 1 and file_layout.get(axis, 1) != 1:
            layout.pop(field, None)
    if layout.get("offload") != file_layout.get("offload") and "offload_directory" in unchanged_fields:
        layout.pop("offload_directory")


def run_from_table(table: Table) -> RunSpec:
    """A RunSpec from a table whose presets are still names."""
    table = dict(table)
    if table.get("layout") == "auto":
        table |= {"layout": {}, "auto_layout": True}
    training = table.get("training")
    if isinstance(training, dict) and training.get("precision") == "auto":
        others = {key: value for key, value in training.items() if key != "precision"}
        table["training"] = {**others, "auto_precision": True}
    if isinstance(model := table.get("model", {}), dict):
        table["model"] = resolve_model(model)
    table["data"] = _add_tokenizer(table.get("data", {}), table.get("model"))
    table["optimizer"] = _limit_warmup(table.get("optimizer", {}), table.get("training"))
    if isinstance(cluster := table.get("cluster", {}), dict):
        table["cluster"] = resolve_preset(cluster, "machines", "cluster")
    return parse_table(RunSpec, table)


def load_model(name: str) -> ModelSpec:
    """The model that `name` means: a preset, a Hugging Face config.json (or its directory), or a TOML file (a run, or
    only its [model] table)."""
    path = Path(name)
    if path.suffix == ".toml":
        table = read_toml(path)
        is_run = "model" in table or set(table) <= set(RunSpec.model_fields)
        return parse_table(ModelSpec, resolve_model(table.get("model", {}) if is_run else table), "model")
    if path.suffix == ".json" or path.is_dir():
        return parse_table(ModelSpec, resolve_model({"from_hf": name}), "model")
    return parse_table(ModelSpec, resolve_model({"preset": name}), "model")


def write_effective_layout(directory: Path, layout: Layout | None) -> None:
    """Write down what layout a start of the run in a directory has; None for its own."""
    file = directory / LAYOUT_FILE
    if layout is None:
        file.unlink(missing_ok=True)
    else:
        temp_file = file.with_suffix(".partial")
        temp_file.write_text(layout.model_dump_json(exclude_defaults=True))
        temp_file.replace(file)  # whole, or not there


def with_last_used_layout(run: RunSpec, directory: Path) -> RunSpec:
    """A run as it was last started.

    Raises UserError if the layout kept there is of another version.
    """
    file = directory / LAYOUT_FILE
    return run.model_copy(update={"layout": parse_table(Layout, _read_json(file))}) if file.exists() else run


def _add_tokenizer(data: Any, model: Any) -> Any:
    """Weights from Hugging Face bring their tokenizer, unless the run file names one."""
    if not isinstance(data, dict) or not isinstance(model, dict) or "tokenizer" in data or "from_hf" not in model:
        return data
    path = hf_config_file(str(model["from_hf"])).parent / "tokenizer.json"
    return {**data, "tokenizer": str(path)} if path.is_file() else data


def _limit_warmup(optimizer: Any, training: Any) -> Any:
    """A short run warms up for at most half of its steps, unless the run file says otherwise."""
    steps = training.get("steps") if isinstance(training, dict) else None
    if not isinstance(optimizer, dict) or "warmup_steps" in optimizer or not isinstance(steps, int) or steps < 1:
        return optimizer
    default_steps = int(OptimizerSpec.model_fields["warmup_steps"].default)
    return {**optimizer, "warmup_steps": steps // 2} if steps < 2 * default_steps else optimizer


def load_machine(name: str) -> ClusterSpec:
    """The machine of a preset."""
    return parse_table(ClusterSpec, resolve_preset({"preset": name}, "machines", "cluster"), "cluster")


def cluster_overrides(cluster: ClusterSpec) -> Table:
    """What makes this cluster of its preset, or of the defaults."""
    base = load_machine(cluster.preset) if cluster.preset else ClusterSpec()
    base_table = base.model_dump(mode="json")
    table = {key: value for key, value in cluster.model_dump(mode="json").items() if value != base_table[key]}
    return {**({"preset": cluster.preset} if cluster.preset else {}), **table}


def hf_config_file(from_hf: str) -> Path:
    """The configuration of `model.from_hf`: a Hugging Face directory, or the config.json in one."""
    path = Path(from_hf).expanduser()
    return path if path.suffix == ".json" else path / "config.json"


RESOLVED_MODEL_FIELDS = {field for field, info in ModelSpec.model_fields.items() if info.is_required()} | {
    "norm_eps",
    "rope",
    "tie_embeddings",
}
"""Fields of a model in the run.toml of a run directory: its config.json was read when the run was created."""


def resolve_model(table: Table) -> Table:
    """Lay a model table over the preset or the Hugging Face config that it names."""
    if not ({"preset", "from_hf"} & set(table)) and "hidden_size" not in table:
        table = {"preset": "tiny", **table}
    source = table.get("from_hf")
    if source is None or set(table) >= RESOLVED_MODEL_FIELDS:
        return resolve_preset(table, "models", "model")
    config = hf_config_file(str(source))
    if not config.is_file():
        raise UserError(
            "model.from_hf", source, f"has no {config.name}", fix="give a directory that save_pretrained wrote"
        )
    return _deep_merge(model_table(_read_json(config)), table)


def resolve_preset(table: Table, folder: str, field: str) -> Table:
    """Lay a table over the preset that it names, if any; `folder` is the presets' folder."""
    name = table.get("preset")
    if name is None:
        return table
    if folder == "machines" and str(name).endswith(".toml"):  # whose own preset is the machine's name
        machine_table = resolve_preset(read_toml(Path(str(name)).expanduser(), "machine file"), folder, field)
        return _deep_merge(machine_table, {key: value for key, value in table.items() if key != "preset"})
    known_presets = preset_names(folder)
    if name not in known_presets:
        raise UserError(f"{field}.preset", name, "is not a known preset", fix=did_you_mean(str(name), known_presets))
    return _deep_merge(tomllib.loads(_presets_folder(folder).joinpath(f"{name}.toml").read_text()), table)


def preset_names(folder: str) -> list[str]:
    """Known presets: `folder` is "models" or "machines"."""
    return sorted(
        file.name.removesuffix(".toml") for file in _presets_folder(folder).iterdir() if file.name.endswith(".toml")
    )


def read_toml(path: str | Path, file_kind: Literal["run file", "machine file"] = "run file") -> Table:
    """Parse a TOML file. Raises UserError if it is not there or not TOML."""
    path = Path(path)
    if path.is_dir() or not path.exists():
        problem = "is a directory" if path.is_dir() else "no such file"
        name = path.name if path.suffix == ".toml" else "run.toml"
        command = f"phalanx init {name}" if file_kind == "run file" else f"phalanx calibrate RUN_DIR ... --out {path}"
        fix = f"give {path / 'run.toml'}" if (path / "run.toml").is_file() else f"write one with: {command}"
        raise UserError(file_kind, str(path), problem, fix=fix)
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(file_kind, str(path), f"is not valid TOML: {error}", fix="mend that line") from None
    except OSError as error:
        raise UserError(
            file_kind, str(path), f"cannot be read: {error.strerror}", fix="check its permissions"
        ) from None


def _presets_folder(folder: str) -> Any:
    return resources.files("phalanx.spec") / "presets" / folder


def _read_json(path: Path) -> Table:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(
            "model config", str(path), f"is not valid JSON: {error}", fix="give a Hugging Face config.json"
        ) from None


def _deep_merge(base: Table, override: Table) -> Table:
    """`override` laid over `base`, table by table."""
    merged = dict(base)
    for key, value in override.items():
        base_value = merged.get(key)
        merged[key] = (
            _deep_merge(base_value, value) if isinstance(base_value, dict) and isinstance(value, dict) else value
        )
    return merged


def _set_path(table: Table, path: list[str], text: str, origin: str) -> None:
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UserError(origin, text, f"{part} is a value, not a table", fix="check the dotted path")
    if text:
        table[path[-1]] = parse_toml_value(text)
    else:
        table.pop(path[-1], None)


def parse_toml_value(text: str) -> Any:
    """Return a TOML value; what is none is taken as text, so that --set name=trial needs no quotes, and 32e9 is a whole
    number too."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    is_whole = isinstance(value, float) and value.is_integer() and "." not in text
    return int(value) if is_whole else value
