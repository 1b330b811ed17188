"""Machine of a table row: the preset of its device, with the links that the row states."""

from __future__ import annotations

import re

from phalanx.plan.tables.cells import read_count, read_number
from phalanx.plan.tables.csv_rows import Row
from phalanx.spec.base import did_you_mean
from phalanx.spec.cluster import GENERATIONS, ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, preset_names


def read_machine(row: Row) -> tuple[ClusterSpec, list[str]]:
    """Return the machine of a row, and the assumptions about it."""
    preset, assumed = _find_preset(row.get("gpu_type", ""))
    cluster = load_machine(preset)
    changes: dict[str, float] = {}
    node = read_count(row, "gpus_per_node", 8)
    domain_size = cluster.fast_link_domain or node
    # Single devices and pairs stay separate, unless a row states its links.
    if domain_size < 8 and not row.get("intra_bw"):
        node = min(domain_size, node)
    changes["fast_link_domain"] = domain_size if domain_size > 8 else node
    for column, field in (("intra_bw", "link_bytes_per_second"), ("inter_bw", "network_bytes_per_second")):
        if row.get(column):
            changes[field] = read_number(row, column) * 1e9
    if not row.get("inter_bw") and read_number(row, "gpus", 1) > changes["fast_link_domain"]:
        assumed.append("network")
        usual_bytes_per_second = GENERATIONS[cluster.generation].network_bytes_per_second
        changes.setdefault("network_bytes_per_second", cluster.network_bytes_per_second or usual_bytes_per_second)
    return cluster.replace(**changes), assumed


def _find_preset(chip: str) -> tuple[str, list[str]]:
    """Return the preset that a device's name stands for, and the assumptions.

    It is the preset that has the most words of the name, in any order. A100-80GB-PCIe is a100-pcie, V100-SXM2-32GB is
    v100-32gb, and an MI250X is one of its halves, as ROCm counts.
    """
    tokens = re.findall(r"[a-z0-9]+", chip.lower())
    halved = ["gcd"] if "mi250x" in tokens and "gcd" not in tokens else []
    presets = preset_names("machines")
    matching_presets = [preset for preset in presets if {*preset.split("-")} <= {*tokens, *halved}]
    if not matching_presets:
        fix = did_you_mean("-".join(tokens), presets, "list the known devices with `phalanx info --list`")
        raise UserError("gpu_type", chip, "is not a known device", fix=fix)
    preset = max(matching_presets, key=lambda name: name.count("-"))
    assumed = ["gpus counts GCDs; an MI250X has two"] if halved else []
    if "pcie" in tokens and (load_machine(preset).fast_link_domain or 0) > 2:
        assumed.append(f"links of {preset}")
    return preset, assumed
