"""Read what a run did from Python: the report and the diagnosis of a run directory. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.debug.explain_run import explain_run
from phalanx.debug.hang_messages import Explanation
from phalanx.report.compare_runs import report_data
from phalanx.report.facts import report_facts
from phalanx.report.formatting import as_sentence, bottleneck_headline
from phalanx.report.html.page import page
from phalanx.report.profiled_steps import Facts
from phalanx.report.run_data import read_run
from phalanx.runs.create import require_run
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.formatting import format_optional, format_ratio
from phalanx.spec.result_tables import data_frame, html_table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Report:
    """The report of a run: predicted and measured quantities, and what limits the speed.

    Example:
        >>> report = phalanx.report_run("runs/first")
        >>> report.facts["run"]["name"], report.facts["run"]["step"]
        ('first', 8)
        >>> report.save_html("first.html")
    """

    facts: Facts
    """The content of `phalanx report --json` for this run. Unknown values are None; `problems` says why."""

    @property
    def comparison(self) -> list[dict[str, Any]]:
        """Quantities with `what`, `unit`, `predicted`, `measured` and `ratio`, in the unit of each row."""
        return list(self.facts["comparison"])

    @property
    def bottleneck(self) -> str | None:
        """The bottleneck of the run with its evidence; None if it is unknown."""
        verdict = self.facts["verdict"]
        if verdict is None:
            return None
        return f"{bottleneck_headline(verdict)}. {as_sentence(verdict['evidence'])}"

    def save_html(self, path: str | Path) -> None:
        """Write the page of `phalanx report`, which needs no network."""
        Path(path).write_text(page(report_data([self.facts])), encoding="utf-8")

    def __repr__(self) -> str:
        return f"Report({self.facts['run']['name']}: {self.bottleneck or 'bottleneck unknown'})"

    def to_dataframe(self) -> pandas.DataFrame:
        """Return `comparison` as a pandas DataFrame.

        Raises:
            UserError: pandas is not installed.
        """
        return data_frame(self.comparison)

    def _repr_html_(self) -> str:
        columns = ("role", "quantity", "unit", "predicted", "measured", "measured / predicted")
        rows = []
        for row in self.comparison:
            predicted = format_optional(row["predicted"])
            measured = format_optional(row["measured"])
            rows.append((row["role"], row["quantity"], row["unit"], predicted, measured, format_ratio(row["ratio"])))
        return html_table(columns, rows, self.bottleneck or self.facts["run"]["name"])


def report_run(run_dir: str | Path, *, html: str | Path | None = None, machine: ClusterSpec | None = None) -> Report:
    """Compare the predicted and the measured quantities of a run, and find its bottleneck.

    Args:
        run_dir: The directory of the run.
        html: A file for the page of the report.
        machine: The machine that times are predicted for, such as `load_machine("here.toml")`. By default that of the
            run file.

    Returns:
        The report. In a notebook it is shown as a table.

    Raises:
        UserError: `run_dir` is not a run directory.

    Example:
        >>> report = phalanx.report_run("runs/first")
        >>> [row["unit"] for row in report.comparison if row["quantity"] == "step"]
        ['s']
    """
    report = Report(report_facts(read_run(Path(run_dir), machine)))
    if html is not None:
        report.save_html(html)
    return report


def diagnose(run_dir: str | Path) -> Explanation:
    """Explain why a run hung or failed, from what its ranks recorded.

    Args:
        run_dir: The directory of the run.

    Returns:
        The verdict with its `summary`, the `ranks` to look at and the `fix`; the last step that all reporting ranks
        finished; a line per rank; and earlier failures.

    Raises:
        UserError: `run_dir` is not a run directory.

    Example:
        >>> explanation = phalanx.diagnose("runs/first")
        >>> explanation.verdict.kind, explanation.verdict.summary
        ('nothing', 'the run finished after step 8')
    """
    directory = Path(run_dir)
    require_run(directory)
    return explain_run(directory)
