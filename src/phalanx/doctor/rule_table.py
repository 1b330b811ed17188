"""Every rule in one table, for docs/doctor.md: `python -m phalanx.doctor.rule_table` prints it."""

from __future__ import annotations

from phalanx.doctor import compare_nodes, cross_node_bandwidth, error_counters, run_checks
from phalanx.doctor.finding import CheckRule

TITLES = {
    "gpus": "GPUs",
    "ecc": "Memory of GPUs",
    "nvlink": "NVLink",
    "topology": "Topology",
    "pcie": "PCIe",
    "software": "Drivers and libraries",
    "rdma_ports": "RDMA ports",
    "roce_gid": "RoCE: addresses",
    "mtu": "RoCE: sizes of packets",
    "roce": "RoCE: without loss",
    "network": "Network of sockets",
    "nccl_variables": "Variables of NCCL",
    "nccl_log": "NCCL's log",
    "limits": "Limits",
    "memory": "Memory",
    "disk": "Disk",
    "clock": "Clock",
    "cpu": "CPUs",
    "kernel_log": "The kernel's log",
}


def rule_sections() -> dict[str, tuple[CheckRule, ...]]:
    """Rules by what they are about."""
    return {
        **{TITLES[run_checks.check_name(check)]: check.RULES for check in run_checks.CHECKS},
        "Whatever a check asks": run_checks.RULES,
        "Nodes beside each other (`--compare-reports`)": compare_nodes.RULES,
        "Between nodes (`phalanx.doctor.multi_node_benchmark`, `--collectives`)": cross_node_bandwidth.RULES,
        "Error counters, before and after that": error_counters.RULES,
    }


def markdown_table() -> str:
    """In Markdown."""
    lines = []
    for title, rules in rule_sections().items():
        lines += [f"## {title}", "", "| id | | measured | well | source | what to do |", "|---|---|---|---|---|---|"]
        for rule in rules:
            threshold = f"{rule.threshold} {rule.unit}".strip()
            cells = (f"`{rule.id}`", rule.severity, rule.quantity, threshold, rule.source, rule.remedy)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
