"""Common states of healthy machines cause no findings, and unreadable facts are reported as not checked."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.machine import COMMAND_SECONDS, Machine
from phalanx.doctor.run_checks import run_all_checks
from phalanx.doctor.subprocesses import CommandOutput
from tests.helpers import h100_snapshot
from tests.helpers.snapshot_edits import (
    SnapshotEdit,
    add_upstream_port,
    append_line,
    append_xid,
    combine_edits,
    create_file,
    delete_paths,
    edit_all_nics,
    edit_gpu_row,
    limit_gpu_rows,
    overwrite_file,
    remove_gpu,
    replace_text,
    set_pci_attribute,
    set_variable,
    unset_variable,
)

CPU_SNAPSHOT = Path(__file__).parent / "cpu_snapshot"
RUN_EXPECTATIONS = Expectations(
    gpus=8, ranks=8, nodes=2, nccl_log="/nccl.log", network_bytes_per_second=50e9, rank_bytes=60 * 2**30
)
KERNEL_LOG_FILE, NIC3, GIB = "commands/kernel_log.txt", "0000:5e:00.0", 2**30
CPU_RUN_EXPECTATIONS = replace(RUN_EXPECTATIONS, gpus=0, rank_bytes=GIB, network_bytes_per_second=None)
GPU_QUERIES = ("identity", "state", "ecc", "remapped", "names")


def limit_visible_gpus(count: int) -> SnapshotEdit:
    """Return the machine as a process sees it that uses this many of its GPUs."""
    return combine_edits(
        *(limit_gpu_rows(query, count) for query in GPU_QUERIES),
        replace_text("commands/torch.txt", '"gpus": 8', f'"gpus": {count}'),
    )


LOGIN_NIC_PATH = "sys/class/infiniband/mlx5_8"
LOGIN_NIC = combine_edits(
    set_variable("NCCL_IB_HCA", ""),
    *(
        create_file(f"{LOGIN_NIC_PATH}/{path}", text)
        for path, text in {
            "board_id": "MT_0000000080",
            "fw_ver": "14.32.1010",
            "device/net/eth9/mtu": "1500",
            "ports/1/state": "1: DOWN",
            "ports/1/phys_state": "3: Disabled",
            "ports/1/rate": "25 Gb/sec (1X EDR)",
            "ports/1/link_layer": "Ethernet",
        }.items()
    ),
    create_file("sys/class/net/eth9/mtu", "1500"),
    create_file("commands/mlnx_qos_eth9.txt", h100_snapshot.MLNX_QOS.replace("state: dscp", "state: pcp")),
)
SMALL_MEMORY = combine_edits(
    overwrite_file("proc/meminfo", f"MemTotal: {8 * 2**20} kB\nMemAvailable: {6 * 2**20} kB"),
    overwrite_file(
        "commands/df_shm.txt", f"{h100_snapshot.DF_HEADER}\ntmpfs {4 * 2**20} 20480 {4 * 2**20 - 20480} 1% /dev/shm"
    ),
)
FULL_PAGE_CACHE = combine_edits(
    create_file("sys/fs/cgroup/memory.max", str(64 * GIB)),
    create_file("sys/fs/cgroup/memory.current", str(63 * GIB)),
    create_file("sys/fs/cgroup/memory.stat", f"anon {6 * GIB}\ninactive_file {10 * GIB}\nactive_file {47 * GIB}"),
)
HEALTHY: dict[str, tuple[SnapshotEdit, Expectations]] = {
    "a container with two of eight GPUs": (
        combine_edits(limit_visible_gpus(2), delete_paths("dev/nvidia[2-7]")),
        replace(RUN_EXPECTATIONS, gpus=None, ranks=2),
    ),
    "a job of Slurm with two of eight GPUs": (
        combine_edits(limit_visible_gpus(2), set_variable("SLURM_GPUS_ON_NODE", "2")),
        replace(RUN_EXPECTATIONS, gpus=None, ranks=2),
    ),
    "GPUs hidden from CUDA": (
        combine_edits(
            set_variable("CUDA_VISIBLE_DEVICES", "-1"), replace_text("commands/torch.txt", '"gpus": 8', '"gpus": 0')
        ),
        RUN_EXPECTATIONS,
    ),
    "a GPU of others, hidden from CUDA": (
        combine_edits(
            set_variable("CUDA_VISIBLE_DEVICES", "0,1"),
            replace_text("commands/torch.txt", '"gpus": 8', '"gpus": 2'),
            edit_gpu_row("identity", 7, " 4,", " 70000,"),
            edit_gpu_row("state", 7, ", Disabled,", ", Enabled,"),
        ),
        replace(RUN_EXPECTATIONS, gpus=2, ranks=2),
    ),
    "an NVIDIA card without its driver, for a run on CPUs": (
        combine_edits(delete_paths("commands/smi_*"), replace_text("commands/torch.txt", '"gpus": 8', '"gpus": 0')),
        CPU_RUN_EXPECTATIONS,
    ),
    "a few recoveries of a link of Blackwell": (
        replace_text(
            "commands/smi_nvlink_errors.txt",
            "Link 3: CRC Errors: 0",
            "Link 3: Link recovery failed events: 0\n\t Link 3: Total link recovery events: 4\n"
            "\t Link 3: FEC Errors - 0: 123456",
        ),
        RUN_EXPECTATIONS,
    ),
    "a PyTorch for CPUs, for a run on them": (
        replace_text("commands/torch.txt", '"gpus": 8', '"gpus": 0'),
        CPU_RUN_EXPECTATIONS,
    ),
    "RoCE as it came, for a run on CPUs": (
        combine_edits(
            set_variable("NCCL_IB_TC", "0"),
            replace_text("proc/self/limits", "memory         unlimited", "memory         8388608"),
        ),
        CPU_RUN_EXPECTATIONS,
    ),
    "a driver that knows of no remapped rows": (
        edit_gpu_row("remapped", 2, "No, No", "[Not Supported], [Not Supported]"),
        RUN_EXPECTATIONS,
    ),
    "an old GPU without remapped rows": (edit_gpu_row("remapped", 2, "No, No", "[N/A], [N/A]"), RUN_EXPECTATIONS),
    "a card for logins, whose port is down": (LOGIN_NIC, RUN_EXPECTATIONS),
    "a card left out that is not there": (set_variable("NCCL_IB_HCA", "^mlx5_bond_0"), RUN_EXPECTATIONS),
    "the loopback, for a run on one node": (
        set_variable("GLOO_SOCKET_IFNAME", "lo"),
        replace(RUN_EXPECTATIONS, nodes=1),
    ),
    "a card that is faster than its slot": (
        combine_edits(
            add_upstream_port(NIC3, "16.0 GT/s PCIe"), set_pci_attribute(NIC3, "current_link_speed", "16.0 GT/s PCIe")
        ),
        RUN_EXPECTATIONS,
    ),
    "a small memory": (SMALL_MEMORY, RUN_EXPECTATIONS),
    "a container that has read many files": (FULL_PAGE_CACHE, RUN_EXPECTATIONS),
    "cores that a virtual machine might have": (
        overwrite_file("sys/devices/system/cpu/offline", "112-239"),
        RUN_EXPECTATIONS,
    ),
    "no SMT": (
        combine_edits(
            overwrite_file("sys/devices/system/cpu/offline", "56-111"),
            overwrite_file("sys/devices/system/cpu/smt/control", "off"),
        ),
        RUN_EXPECTATIONS,
    ),
    "a floppy drive without a floppy": (
        append_line(KERNEL_LOG_FILE, "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0"),
        RUN_EXPECTATIONS,
    ),
    "a CD drive without a CD": (
        append_line(KERNEL_LOG_FILE, "blk_update_request: I/O error, dev sr0, sector 0"),
        RUN_EXPECTATIONS,
    ),
    "a card for radio on one lane": (
        append_line(
            KERNEL_LOG_FILE, "pci 0000:03:00.0: 4.000 Gb/s available PCIe bandwidth, limited by 5.0 GT/s PCIe x1 link"
        ),
        RUN_EXPECTATIONS,
    ),
    "variables in a file of NCCL": (
        combine_edits(
            unset_variable("NCCL_IB_TC"),
            unset_variable("NCCL_IB_GID_INDEX"),
            create_file("etc/nccl.conf", "NCCL_IB_TC=106\nNCCL_IB_GID_INDEX=3\nNCCL_IB_HCA=nosuch"),
        ),
        RUN_EXPECTATIONS,
    ),
    "variables in the file that NCCL_CONF_FILE names": (
        combine_edits(
            unset_variable("NCCL_IB_TC"),
            set_variable("NCCL_CONF_FILE", "/opt/nccl.conf"),
            create_file("opt/nccl.conf", "NCCL_IB_TC=106"),
            create_file("~/.nccl.conf", "NCCL_IB_DISABLE=1"),
        ),
        RUN_EXPECTATIONS,
    ),
    "an NCCL whose version names no host": (
        combine_edits(
            replace_text("nccl.log", "node1:4021:4021 [0] NCCL INFO NCCL version", "NCCL version"),
            replace_text("nccl.log", "node2:3811:3902 [0] NCCL INFO NCCL version 2.26.2+cuda12.8\n", ""),
        ),
        RUN_EXPECTATIONS,
    ),
    "a GPU that was idle at boot": (
        append_line(
            KERNEL_LOG_FILE,
            "pci 0000:52:00.0: 32.000 Gb/s available PCIe bandwidth, limited by 2.5 GT/s PCIe x16 link at "
            "0000:4e:01.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)",
        ),
        RUN_EXPECTATIONS,
    ),
    "a GPU that needs nothing any more": (
        append_line(
            KERNEL_LOG_FILE,
            "NVRM: Xid (PCI:0000:52:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        ),
        RUN_EXPECTATIONS,
    ),
    "a journal with what dmesg says": (
        create_file("commands/kernel_journal.txt", h100_snapshot.KERNEL_LOG),
        RUN_EXPECTATIONS,
    ),
    "a link whose speed is not known": (overwrite_file("sys/class/net/eno1/speed", "-1"), RUN_EXPECTATIONS),
    "a GID of a flat network, by its index": (
        combine_edits(
            set_variable("NCCL_IB_GID_INDEX", "1"),
            edit_all_nics(
                lambda card: combine_edits(
                    *(
                        overwrite_file(f"sys/class/infiniband/mlx5_{card}/ports/1/gids/{i}", ":".join(["0000"] * 8))
                        for i in (2, 3)
                    )
                )
            ),
        ),
        RUN_EXPECTATIONS,
    ),
}
DMESG_DENIED = "dmesg: read kernel buffer failed: Operation not permitted\n[exit 1]"
SKIPPED_CHECKS: dict[str, tuple[SnapshotEdit, str, str]] = {
    "no counters of PCIe errors": (delete_paths("sys/bus/pci/devices/*/aer_*"), "pcie.errors", "no device reports"),
    "no query for remapped rows": (
        overwrite_file("commands/smi_remapped.txt", "ERROR: Option --query-remapped-rows is not recognized\n[exit 2]"),
        "ecc.remap_pending",
        "not recognized",
    ),
    "no errors of NVLinks": (
        overwrite_file("commands/smi_nvlink_errors.txt", "NVML: Not Supported\n[exit 3]"),
        "nvlink.errors",
        "Not Supported",
    ),
    "a kernel's log for root": (
        combine_edits(overwrite_file(KERNEL_LOG_FILE, DMESG_DENIED), create_file("commands/kernel_journal.txt", "")),
        "kernel_log",
        "(dmesg: read kernel buffer failed: Operation not permitted; journalctl: nothing)",
    ),
    "a kernel's log that is empty, and a journal": (
        combine_edits(overwrite_file(KERNEL_LOG_FILE, ""), create_file("commands/kernel_journal.txt", "")),
        "kernel_log",
        "nothing",
    ),
    "no counter of links that went down": (
        delete_paths("sys/class/infiniband/*/ports/1/counters/link_downed"),
        "rdma.flaps",
        "no device reports",
    ),
    "no version of firmware": (delete_paths("sys/class/infiniband/*/fw_ver"), "rdma.firmware", "no device reports"),
    "no chrony": (
        combine_edits(
            delete_paths("commands/chrony.txt"), create_file("commands/timedatectl.txt", "NTPSynchronized=yes")
        ),
        "clock.offset",
        "chronyc",
    ),
    "a container without the host's network": (delete_paths("sys/class/infiniband/*/device/net"), "roce", "container"),
    "a df that says nothing": (
        overwrite_file("commands/df_runs.txt", "df: no file systems processed\n[exit 1]"),
        "disk.room",
        "df",
    ),
    "GPUs that do not say why they are slow": (
        combine_edits(*(edit_gpu_row("state", gpu, "Not Active, Not Active", "[N/A], [N/A]") for gpu in range(8))),
        "gpu.slowdown",
        "no device reports",
    ),
    "a card for logins": (LOGIN_NIC, "rdma.state", "mlx5_8"),
    "the network of a run on one node": (set_variable("GLOO_SOCKET_IFNAME", "lo"), "network", "one node"),
    "a name that has no address": (set_variable("MASTER_ADDR", "node1"), "nccl.route", "node1"),
}
"""Edits of the snapshot, the check or rule that is skipped, and a word of the reason."""


def problem_summaries(root: Path, expected: Expectations = RUN_EXPECTATIONS) -> list[tuple[str, str, str]]:
    findings = run_all_checks(Machine(root), expected)
    return [
        (finding.id, finding.device, str(finding.measured))
        for finding in findings
        if finding.severity in ("WARN", "FAIL")
    ]


@pytest.mark.parametrize("name", HEALTHY)
def test_doctor_has_no_findings_for_common_healthy_settings(name: str, h100: Path) -> None:
    plant, expected = HEALTHY[name]
    plant(h100)
    assert problem_summaries(h100, expected) == []


@pytest.mark.parametrize("name", SKIPPED_CHECKS)
def test_doctor_skips_check_with_reason_when_data_is_unavailable(name: str, h100: Path) -> None:
    plant, rule, text = SKIPPED_CHECKS[name]
    plant(h100)
    findings = run_all_checks(
        Machine(h100), replace(RUN_EXPECTATIONS, nodes=1) if rule == "network" else RUN_EXPECTATIONS
    )
    assert [finding for finding in findings if finding.severity in ("WARN", "FAIL")] == []
    reasons = [str(finding.measured) for finding in findings if finding.id == rule and finding.severity == "SKIP"]
    assert len(reasons) == 1
    assert text in reasons[0]


def test_doctor_disk_check_subtracts_existing_checkpoints(h100: Path) -> None:
    """614 GB are free: enough for two more checkpoints of 250 GB, not for
    four. An incomplete checkpoint does not count."""
    replace_text("commands/df_runs.txt", "6000898765", "600089876")(h100)
    for name in ("step-00000010", "step-00000020", "step-00000030.tmp"):
        (h100 / "runs/checkpoints" / name).mkdir(parents=True)
    run = replace(RUN_EXPECTATIONS, checkpoints_bytes=10**12, checkpoint_bytes=25 * 10**10)
    assert problem_summaries(h100, run) == [("disk.room", ".", "614.492")]
    assert problem_summaries(h100, replace(run, checkpoints="/runs/checkpoints")) == []


def test_doctor_ignores_failing_nvidia_smi_unless_run_needs_gpus(tmp_path: Path) -> None:
    shutil.copytree(CPU_SNAPSHOT, tmp_path, dirs_exist_ok=True)
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n[exit 9]"
    create_file("commands/smi_list.txt", text)(tmp_path)
    create_file("commands/smi_identity.txt", text)(tmp_path)
    assert problem_summaries(tmp_path, Expectations()) == []
    assert [summary[0] for summary in problem_summaries(tmp_path, Expectations(gpus=1))] == ["gpu.answers"]


def test_doctor_reports_lost_gpu_when_gpu_count_is_not_specified(h100: Path) -> None:
    """The device file of a lost GPU remains. A GPU that no driver has claimed has no device file."""
    remove_gpu(5)(h100)
    assert problem_summaries(h100, replace(RUN_EXPECTATIONS, gpus=None)) == [("gpu.count", "", "7")]
    delete_paths("sys/bus/pci/devices/0000:c3:00.0/driver")(h100)
    delete_paths("dev/nvidia7")(h100)
    assert problem_summaries(h100, replace(RUN_EXPECTATIONS, gpus=None)) == [("gpu.count", "", "7")]


def test_doctor_reports_inactive_nvlinks_and_stopped_fabric_manager(h100: Path) -> None:
    line = "NVML: Unable to retrieve NVLink information as all links are inActive"
    status = "\n".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i})\n\t {line}" for i in range(8))
    overwrite_file("commands/smi_nvlink.txt", status)(h100)
    overwrite_file("commands/fabric_manager.txt", "failed\n[exit 3]")(h100)
    problems = {summary[:2] for summary in problem_summaries(h100)}
    links = {("nvlink.active", f"GPU{i}") for i in range(8)}
    assert problems == links | {("nvlink.fabric_manager", "nvidia-fabricmanager")}
    overwrite_file("commands/smi_nvlink.txt", "NVML: Driver Not Loaded\n[exit 9]")(h100)
    assert {summary[0] for summary in problem_summaries(h100)} == {"nvlink.fabric_manager"}


def test_doctor_reports_ecc_errors_when_remapped_rows_are_unknown(h100: Path) -> None:
    overwrite_file("commands/smi_remapped.txt", "ERROR: Option --query-remapped-rows is not recognized\n[exit 2]")(h100)
    edit_gpu_row("ecc", 4, "0, 0", "0, 3")(h100)
    assert problem_summaries(h100) == [("ecc.uncorrected", "GPU4", "3")]


def test_doctor_reports_only_nccl_hca_when_no_hca_matches(h100: Path) -> None:
    set_variable("NCCL_IB_HCA", "nosuch")(h100)
    assert problem_summaries(h100) == [("nccl.hca", "nosuch", "missing")]


class CommandRecordingMachine(Machine):
    """Machine that records commands. It answers `ip route get` with the recorded output for any address."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[tuple[str, ...]] = []

    def run(self, name: str, *arguments: str, seconds: float = COMMAND_SECONDS) -> CommandOutput | None:
        self.asked.append(arguments)
        return super().run(name, *arguments, seconds=seconds)


def test_doctor_resolves_master_addr_before_route_lookup(h100: Path) -> None:
    """`ip` accepts addresses only, but launchers may set a host name."""
    set_variable("MASTER_ADDR", "node1")(h100)
    create_file("commands/master.txt", "10.0.0.2        STREAM node1\n10.0.0.2        DGRAM")(h100)
    machine = CommandRecordingMachine(h100)
    findings = {finding.id: finding for finding in run_all_checks(machine, RUN_EXPECTATIONS)}
    assert (findings["nccl.route"].severity, findings["nccl.route"].measured) == ("OK", "eno1")
    assert [command for command in machine.asked if command[0] == "ip"] == [("ip", "route", "get", "10.0.0.2")]


def test_doctor_reports_xid_cause_instead_of_recovery_action(h100: Path) -> None:
    append_xid(48)(h100)
    line = "NVRM: Xid (PCI:0000:52:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    append_line(KERNEL_LOG_FILE, line)(h100)
    assert problem_summaries(h100) == [("kernel.xid", "0000:52:00.0", "48")]


def test_doctor_command_uses_nvidia_smi_gpu_index(h100: Path) -> None:
    edit_gpu_row("state", 3, ", Disabled,", ", Enabled,")(h100)
    (failure,) = (finding for finding in run_all_checks(Machine(h100), RUN_EXPECTATIONS) if finding.severity == "FAIL")
    assert failure.command == "nvidia-smi -i 3 -mig 0"


def test_doctor_findings_use_slurm_node_name(h100: Path) -> None:
    overwrite_file("proc/sys/kernel/hostname", "gpu-03.cluster.example")(h100)
    set_variable("SLURMD_NODENAME", "gpu-03")(h100)
    findings: list[DoctorFinding] = run_all_checks(Machine(h100), RUN_EXPECTATIONS)
    assert {finding.host for finding in findings} == {"gpu-03"}


def test_doctor_reads_long_nccl_log_to_end(h100: Path) -> None:
    text = (h100 / "nccl.log").read_text()
    late = "node2:3811:3902 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion with error 12\n"
    (h100 / "nccl.log").write_text(text + text.splitlines(keepends=True)[0] * 70_000 + late)
    assert problem_summaries(h100) == [("nccl.warnings", "node2", "NET/IB : Got completion with error 12")]
