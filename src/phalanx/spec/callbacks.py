"""Description of the user's callbacks of a run."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_serializer, model_validator

from phalanx.spec.base import Spec, require


class CallbackSpec(Spec):
    """A callback: the import path of its class, and the arguments of the class.

    The short form is the import path alone: `stop_early = "my_callbacks:StopEarly"`.
    """

    model_config = ConfigDict(extra="allow")

    class_path: str = Field(alias="class")
    """Import path of the class: "package.module:Class"."""

    @property
    def module(self) -> str:
        """Name of the module that defines the class."""
        return self.class_path.partition(":")[0]

    @property
    def class_name(self) -> str:
        """Name of the class in its module."""
        return self.class_path.partition(":")[2]

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class: all other keys of the table."""
        return dict(self.model_extra or {})

    @model_serializer
    def _to_table(self) -> dict[str, Any]:
        return {"class": self.class_path, **self.arguments}

    @model_validator(mode="after")
    def _check(self) -> CallbackSpec:
        require(
            all(part.isidentifier() for part in [*self.module.split("."), self.class_name]),
            "class",
            self.class_path,
            problem="is not a valid import path",
            fix='write "package.module:Class"',
        )
        return self

    @model_validator(mode="before")
    @classmethod
    def _accept_import_path(cls, value: Any) -> Any:
        return {"class": value} if isinstance(value, str) else value
