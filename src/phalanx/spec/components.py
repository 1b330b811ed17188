"""Description of the user's own components of a run: import paths and arguments, and the layouts that allow them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, model_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from phalanx.spec.base import Spec
from phalanx.spec.errors import UserError
from phalanx.spec.parallel_dims import transformer_only_options

if TYPE_CHECKING:
    from phalanx.spec.run import RunSpec

COMPONENT_FIELDS = (
    ("model", "implementation"),
    ("training", "loss"),
    ("optimizer", "implementation"),
    ("optimizer", "lr_function"),
    ("data", "dataset"),
)
"""Section and field of each component of a run, besides the table of callbacks."""


class ComponentSpec(Spec):
    """A class or function of the user: its import path, and its keyword arguments.

    The short form is the import path alone: `stop_early = "my_callbacks:StopEarly"`.
    """

    model_config = ConfigDict(extra="allow")

    class_path: str = Field(alias="class")
    """Import path of the class or function: "package.module:Name"."""
    named_in: SkipJsonSchema[str | None] = None
    """Run file that names the class if it belongs to a run directory and the user did not trust it; else None.

    The loader of run files sets it. It is written with the table, so a copy of the run is not trusted either."""

    @property
    def module(self) -> str:
        """Name of the module that defines the class."""
        return self.class_path.partition(":")[0]

    @property
    def name(self) -> str:
        """Name of the class in its module."""
        return self.class_path.partition(":")[2]

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments: all other keys of the table."""
        return dict(self.model_extra or {})

    @model_serializer
    def _to_table(self) -> dict[str, Any]:
        origin = {} if self.named_in is None else {"named_in": self.named_in}
        return {"class": self.class_path, **origin, **self.arguments}

    @model_validator(mode="after")
    def _check_import_path(self) -> ComponentSpec:
        if not all(part.isidentifier() for part in [*self.module.split("."), self.name]):
            raise UserError("class", self.class_path, "is not a valid import path", 'write "package.module:Name"')
        return self

    @model_validator(mode="before")
    @classmethod
    def _accept_import_path(cls, value: Any) -> Any:
        return {"class": value} if isinstance(value, str) else value


def named_components(run: RunSpec) -> Iterator[tuple[str, ComponentSpec]]:
    """Yield the field and the description of each of the user's components."""
    for section, field in COMPONENT_FIELDS:
        component: ComponentSpec | None = getattr(getattr(run, section), field)
        if component is not None:
            yield f"{section}.{field}", component
    for name, callback in run.callbacks.items():
        yield f"callbacks.{name}", callback


def mark_components(table: dict[str, Any], file: str | None) -> None:
    """Record in the table of a run file that its components are untrusted.

    The table is changed in place. `file` is the run file; None if the user trusts it.
    """
    callbacks = table.get("callbacks")
    places = [(table.get(section), field) for section, field in COMPONENT_FIELDS]
    places += [(callbacks, name) for name in callbacks] if isinstance(callbacks, dict) else []
    for section, field in places:
        if not isinstance(section, dict) or not isinstance(section.get(field), str | dict):
            continue
        component = section[field]
        arguments = {"class": component} if isinstance(component, str) else component
        arguments = {key: value for key, value in arguments.items() if key != "named_in"}
        section[field] = arguments if file is None else {**arguments, "named_in": file}


def require_trusted(field: str, component: ComponentSpec, fix: str = "") -> None:
    """Raise UserError for a component that only a run directory names.

    `fix` is the remedy of a command without `--trust`.
    """
    remedy = "read that code, then add --trust (trust=True in Python), or name it in your own run file or with --set"
    if component.named_in is not None:
        problem = f"is code that only the run directory's {component.named_in} names"
        raise UserError(field, component.class_path, problem, fix or remedy)


def check_components(run: RunSpec) -> None:
    """Raise UserError for a layout or setting that a component of the user does not support."""
    model = run.model
    if run.training.loss is not None and run.layout.tp != 1:
        problem = "splits the logits that training.loss receives"
        raise UserError("layout.tp", run.layout.tp, problem, "set layout.tp = 1, or remove training.loss")
    if run.data.dataset is not None and run.data.streaming:
        problem = "cannot be combined with data.dataset, which provides the tokens"
        raise UserError("data.streaming", True, problem, "remove data.streaming")
    if model.implementation is None:
        return
    problem = "is for Phalanx's own transformer only, but the run has model.implementation"
    for field, value, default in transformer_only_options(run.layout):
        fix = f"set layout.{field} = {default!r}, and implement it in the module"
        raise UserError(f"layout.{field}", value, problem, fix)
    if run.training.precision == "fp8":
        fix = 'set training.precision = "bf16", and compute in float8 in the module'
        raise UserError("training.precision", "fp8", problem, fix)
    for name, value in (("moe", model.moe), ("from_hf", model.from_hf)):
        if value is not None:
            fix = f"remove model.{name}, and implement it in the module"
            raise UserError(f"model.{name}", value if isinstance(value, str) else None, problem, fix)
