"""The options of a rank's command."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.runs.checkpoints import NamedStep
from phalanx.spec.layout import Layout


@dataclass(frozen=True)
class ReducedRanks:
    """Number and layout of the ranks, if there are fewer than the run was configured for."""

    layout: Layout
    ranks: int


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The options of a rank's command."""

    overrides: tuple[str, ...] = ()
    """Changes of a run file's fields, as "section.field=value"."""
    machine: str | None = None
    """Machine description of a run file, instead of the one that it names."""
    resume: bool = False
    """Continue from the newest checkpoint."""
    step: NamedStep = None
    """With `resume`: continue from the checkpoint of this step, and rename newer ones."""
    measure: bool = False
    """Measure the memory and the traffic of one step."""
    window: range | None = None
    """Steps to profile."""
    reduced: ReducedRanks | None = None
    """Layout of fewer ranks than the run's."""
    device: str | None = None
    """Device type chosen by a launcher."""
    force: bool = False
    """Start even if a run file plans more memory than is available."""
    trust: bool = False
    """Import the components that a run directory names."""
