"""Phalanx plans, runs and verifies distributed training of language models.

The names below are imported when they are first used: `import phalanx` imports neither torch nor numpy.
`plan_run`, `train_run` and `report_run` are not called `plan`, `train` and `report`: those are packages, and importing
one of their modules would replace the function. docs/guides/python-api.md is the guide.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.api.planning import memory, plan_run, predict, traffic
    from phalanx.api.run_results import Report, diagnose, report_run
    from phalanx.api.trained_model import load_model
    from phalanx.api.training import TrainResult, run_rank, train_run
    from phalanx.launch.process import init_distributed
    from phalanx.model.generation import generate
    from phalanx.parallel.data.distribute import distribute
    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.step_result import StepResult
    from phalanx.parallel.strategy import Strategy
    from phalanx.plan.search.result import EvaluatedLayout, Plan
    from phalanx.report.run_data import RunData, read_run
    from phalanx.spec.cluster import ClusterSpec
    from phalanx.spec.errors import UserError
    from phalanx.spec.files.load import load_machine, load_model_spec, load_run, run_from_table
    from phalanx.spec.layout import Layout
    from phalanx.spec.model import ModelSpec
    from phalanx.spec.run import RunSpec, TrainingSpec
    from phalanx.train.callbacks.callback import Callback
    from phalanx.verify.dry_run_report import DryRunReport, dry_run

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "ClusterSpec",
    "DryRunReport",
    "EvaluatedLayout",
    "Layout",
    "ModelSpec",
    "Plan",
    "Report",
    "RunData",
    "RunSpec",
    "StepResult",
    "Strategy",
    "TrainResult",
    "TrainingSpec",
    "UserError",
    "build_mesh",
    "diagnose",
    "distribute",
    "dry_run",
    "generate",
    "init_distributed",
    "load_machine",
    "load_model",
    "load_model_spec",
    "load_run",
    "memory",
    "plan_run",
    "predict",
    "read_run",
    "report_run",
    "run_from_table",
    "run_rank",
    "traffic",
    "train_run",
]

_PUBLIC_NAMES = {
    "phalanx.api.planning": ("memory", "plan_run", "predict", "traffic"),
    "phalanx.api.run_results": ("Report", "diagnose", "report_run"),
    "phalanx.api.trained_model": ("load_model",),
    "phalanx.api.training": ("TrainResult", "run_rank", "train_run"),
    "phalanx.launch.process": ("init_distributed",),
    "phalanx.model.generation": ("generate",),
    "phalanx.parallel.data.distribute": ("distribute",),
    "phalanx.parallel.mesh": ("build_mesh",),
    "phalanx.parallel.step_result": ("StepResult",),
    "phalanx.parallel.strategy": ("Strategy",),
    "phalanx.plan.search.result": ("EvaluatedLayout", "Plan"),
    "phalanx.report.run_data": ("RunData", "read_run"),
    "phalanx.spec.cluster": ("ClusterSpec",),
    "phalanx.spec.errors": ("UserError",),
    "phalanx.spec.files.load": ("load_machine", "load_model_spec", "load_run", "run_from_table"),
    "phalanx.spec.layout": ("Layout",),
    "phalanx.spec.model": ("ModelSpec",),
    "phalanx.spec.run": ("RunSpec", "TrainingSpec"),
    "phalanx.train.callbacks.callback": ("Callback",),
    "phalanx.verify.dry_run_report": ("DryRunReport", "dry_run"),
}
"""Public names by the module that defines them. Type checkers read the imports above, which are the same."""
_MODULE_OF_NAME = {name: module for module, names in _PUBLIC_NAMES.items() for name in names}


if not TYPE_CHECKING:  # to a type checker it would mean that every name exists

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULE_OF_NAME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
