"""The user's own components of a run, as a run file names them. No torch in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from phalanx.spec.base import did_you_mean, require
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.run import RunSpec

Component = str | Mapping[str, Any] | Callable[..., Any]
"""A class or function of the user: its import path, a table with "class" and arguments, or the object itself."""


class Components(TypedDict, total=False):
    """The user's own components of a run.

    Each is an import path ("package.module:Name"), a table with "class" and arguments, or a class or function that is
    defined in a module, which ranks can import."""

    model: Component
    """Network, as `model.implementation` of the run file."""
    loss: Component
    """Loss function, as `training.loss`."""
    optimizer: Component
    """Optimizer, as `optimizer.implementation`."""
    lr_schedule: Component
    """Learning-rate function, as `optimizer.lr_function`."""
    data: Component
    """Dataset, as `data.dataset`."""
    callbacks: Mapping[str, Component]
    """Callbacks by name, in addition to those of the run."""


FIELDS = {
    "model": "model.implementation",
    "loss": "training.loss",
    "optimizer": "optimizer.implementation",
    "lr_schedule": "optimizer.lr_function",
    "data": "data.dataset",
}
"""Fields of the run file by the names of `Components`."""


def with_components(run: RunSpec | str | Path, components: Components) -> RunSpec | str | Path:
    """Return a run with the user's components.

    Args:
        run: The run, the path of its file, or a run directory, which components cannot change.
        components: Components to set.

    Raises:
        UserError: A component cannot be imported by the ranks, or `run` is a run directory.
    """
    named: Mapping[str, Any] = {**components}
    for name in named:
        fix = did_you_mean(name, [*Components.__annotations__])
        require(name in Components.__annotations__, name, None, "is not a component", fix)
    changes: dict[str, Component] = {field: named[name] for name, field in FIELDS.items() if name in named}
    changes |= {f"callbacks.{name}": callback for name, callback in components.get("callbacks", {}).items()}
    if not changes:
        return run
    if not isinstance(run, RunSpec):
        if Path(run).is_dir():
            field = next(iter(changes))
            raise UserError(field, None, "has no effect on a run directory", fix="pass the run file or a RunSpec")
        run = load_run(run)
    table = run.model_dump(mode="json")
    # Defaults of the optimizer remain those of the model.
    table["optimizer"] = run.optimizer.model_dump(mode="json", exclude_unset=True)
    for path, component in changes.items():
        section, _, field = path.partition(".")
        table[section][field] = _component_to_table(path, component)
    return run.replace(**{section: table[section] for section in {path.partition(".")[0] for path in changes}})


def _component_to_table(field: str, component: Component) -> str | Mapping[str, Any]:
    """Return a component as a run file names it."""
    if isinstance(component, str | Mapping):
        return component
    name = getattr(component, "__qualname__", None)
    if name is None or component.__module__ == "__main__" or "." in name:
        problem = "cannot be imported by the ranks, which are other processes"
        fix = "define it at the top level of a module, in a file of its own"
        raise UserError(field, name or repr(component), problem, fix=fix)
    return f"{component.__module__}:{name}"
