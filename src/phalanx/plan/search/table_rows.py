"""Layouts in the text of a row of the plan's table, which `CandidateLayout.__str__` writes."""

from __future__ import annotations

import re

from phalanx.spec.base import parse_table
from phalanx.spec.layout import Layout

ROW = re.compile(
    r"(?P<data_parallel>\w+)(?: of (?P<dp_shard>\d+))? dp \d+"
    r"(?:, tp (?P<tp>\d+))?"
    r"(?:, cp (?P<cp>\d+) (?P<cp_method>\w+))?"
    r"(?:, ep (?P<ep>\d+))?"
    r"(?:, pp (?P<pp>\d+)(?P<pipeline_outer> \(outer\))? (?P<schedule>[\w-]+)(?: x (?P<virtual_stages>\d+))?)?"
    r", micro-batch (?P<micro_batch_size>\d+) x \d+"
    r"(?:, recompute (?P<activation_checkpointing>\w+)(?: in (?P<recomputed_blocks>[\d/]+) blocks?(?: a rank)?)?)?"
    r"(?P<offloads_inputs>, offload inputs)?"
    r"(?:, offload (?P<offload>\w+))?"
)
INTEGERS = ("dp_shard", "tp", "cp", "ep", "pp", "virtual_stages", "micro_batch_size")


def normalize_row(text: str) -> str:
    """Return the layout in the text of a row without the row's number, its figures and its line breaks."""
    without_number = re.sub(r"^\d+\*?\s+", "", text.strip())
    lines = (re.split(r"\s{2,}(?=\d)", line.strip())[0] for line in without_number.splitlines())
    return " ".join(" ".join(lines).split())


def layout_of_row(text: str) -> Layout | None:
    """Return the layout in the text of a row; None if it is not one. The directory of an offload is not in it."""
    match = ROW.fullmatch(normalize_row(text))
    if match is None:
        return None
    table: dict[str, object] = {name: value for name, value in match.groupdict().items() if value is not None}
    table |= {name: int(match[name]) for name in INTEGERS if name in table}
    if match["recomputed_blocks"]:
        counts = [int(count) for count in match["recomputed_blocks"].split("/")]
        table["recomputed_blocks"] = counts if len(counts) > 1 else counts[0]
    if table.pop("pipeline_outer", None):
        table["rank_order"] = "pipeline_outer"
    if table.pop("offloads_inputs", None):
        table["activation_checkpointing"] = "offload"
    return parse_table(Layout, table, "layout")
