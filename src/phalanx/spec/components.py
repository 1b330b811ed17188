"""Description of the user's own components of a run: import paths and arguments, and the layouts that allow them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, model_serializer, model_validator

from phalanx.spec.base import Spec, require
from phalanx.spec.errors import UserError
from phalanx.spec.parallel_dims import transformer_only_options

if TYPE_CHECKING:
    from phalanx.spec.run import RunSpec


class ComponentSpec(Spec):
    """A class or function of the user: its import path, and its keyword arguments.

    The short form is the import path alone: `stop_early = "my_callbacks:StopEarly"`.
    """

    model_config = ConfigDict(extra="allow")

    class_path: str = Field(alias="class")
    """Import path of the class or function: "package.module:Name"."""

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
        return {"class": self.class_path, **self.arguments}

    @model_validator(mode="after")
    def _check(self) -> ComponentSpec:
        require(
            all(part.isidentifier() for part in [*self.module.split("."), self.name]),
            "class",
            self.class_path,
            problem="is not a valid import path",
            fix='write "package.module:Name"',
        )
        return self

    @model_validator(mode="before")
    @classmethod
    def _accept_import_path(cls, value: Any) -> Any:
        return {"class": value} if isinstance(value, str) else value


def named_components(run: RunSpec) -> Iterator[tuple[str, ComponentSpec]]:
    """Yield the field and the description of each of the user's components."""
    for field, component in (
        ("model.implementation", run.model.implementation),
        ("training.loss", run.training.loss),
        ("optimizer.implementation", run.optimizer.implementation),
        ("optimizer.lr_function", run.optimizer.lr_function),
        ("data.dataset", run.data.dataset),
    ):
        if component is not None:
            yield field, component
    for name, callback in run.callbacks.items():
        yield f"callbacks.{name}", callback


def check_components(run: RunSpec) -> None:
    """Raise UserError for a layout or setting that a component of the user does not support."""
    model = run.model
    if run.training.loss is not None:
        require(
            run.layout.tp == 1,
            "layout.tp",
            run.layout.tp,
            problem="splits the logits that training.loss receives",
            fix="set layout.tp = 1, or remove training.loss",
        )
    require(
        run.data.dataset is None or not run.data.streaming,
        "data.streaming",
        True,
        problem="cannot be combined with data.dataset, which provides the tokens",
        fix="remove data.streaming",
    )
    if model.implementation is None:
        return
    for field, value, default in transformer_only_options(run.layout):
        problem = "is for Phalanx's own transformer only, but the run has model.implementation"
        fix = f"set layout.{field} = {default!r}, and implement it in the module"
        raise UserError(f"layout.{field}", value, problem, fix=fix)
    require(
        run.training.precision != "fp8",
        "training.precision",
        "fp8",
        problem="is for Phalanx's own transformer only, but the run has model.implementation",
        fix='set training.precision = "bf16", and compute in float8 in the module',
    )
    for name, value in (("moe", model.moe), ("from_hf", model.from_hf)):
        require(
            value is None,
            f"model.{name}",
            value if isinstance(value, str) else None,
            problem="is for Phalanx's own transformer only, but the run has model.implementation",
            fix=f"remove model.{name}, and implement it in the module",
        )
