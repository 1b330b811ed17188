"""Table of all rules for docs/reference/doctor-rules.md: `python -m phalanx.doctor.rule_table` prints it."""

from __future__ import annotations

from phalanx.doctor import compare_nodes, cross_node_bandwidth, error_counters, run_checks
from phalanx.doctor.finding import CheckRule

TITLES = {
    "gpus": "GPUs",
    "ecc": "GPU memory",
    "nvlink": "NVLink",
    "topology": "Topology",
    "pcie": "PCIe",
    "software": "Drivers and libraries",
    "rdma_ports": "RDMA ports",
    "roce_gid": "RoCE: addresses",
    "mtu": "RoCE: packet sizes",
    "roce": "RoCE: lossless",
    "network": "Socket network",
    "nccl_variables": "NCCL variables",
    "nccl_log": "NCCL log",
    "limits": "Limits",
    "memory": "Memory",
    "disk": "Disk",
    "clock": "Clock",
    "cpu": "CPUs",
    "kernel_log": "Kernel log",
}


def rule_sections() -> dict[str, tuple[CheckRule, ...]]:
    """Return the rules by section of the document."""
    return {
        **{TITLES[run_checks.check_name(check)]: check.RULES for check in run_checks.CHECKS},
        "Every check": run_checks.RULES,
        "Comparison of nodes (`--compare-reports`)": compare_nodes.RULES,
        "Between nodes (`phalanx.doctor.multi_node_benchmark`, `--collectives`)": cross_node_bandwidth.RULES,
        "Error counters, before and after the benchmark": error_counters.RULES,
    }


def markdown_table() -> str:
    """Return all rules as Markdown tables."""
    lines = []
    for title, rules in rule_sections().items():
        lines += [f"## {title}", "", "| id | | measured | expected | source | remedy |", "|---|---|---|---|---|---|"]
        for rule in rules:
            threshold = f"{rule.threshold} {rule.unit}".strip()
            cells = (f"`{rule.id}`", rule.severity, rule.quantity, threshold, rule.source, rule.remedy)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
