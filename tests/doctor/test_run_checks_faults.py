"""Faults planted in a snapshot of a machine. Each is the only finding, with the right device
and a remedy; a healthy machine has no findings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.machine import Machine
from phalanx.doctor.rules import SECTIONS
from phalanx.doctor.run_checks import CHECKS, run_all_checks
from tests.helpers.snapshot_edits import (
    SnapshotEdit,
    add_upstream_port,
    append_line,
    append_to_nvidia_smi_outputs,
    append_xid,
    combine_edits,
    create_file,
    edit_all_nics,
    edit_gpu_row,
    overwrite_file,
    remove_gpu,
    replace_text,
    set_pci_attribute,
    set_rdma_port,
    set_variable,
    unset_variable,
)

EXPECTED = Expectations(
    gpus=8,
    ranks=8,
    nodes=2,
    nccl_log="/nccl.log",
    network_bytes_per_second=50e9,
    rank_bytes=60 * 2**30,
    checkpoints_bytes=10**12,
)

GPU2, NIC3, KERNEL_LOG_FILE = "0000:52:00.0", "0000:5e:00.0", "commands/kernel_log.txt"
FAULTS: dict[str, tuple[SnapshotEdit, str, str, str]] = {
    "a GPU is lost": (remove_gpu(5), "gpu.count", "FAIL", ""),
    "nvidia-smi hangs": (overwrite_file("commands/smi_identity.txt", "[no answer]"), "gpu.answers", "FAIL", ""),
    "the driver's libraries are newer": (
        overwrite_file(
            "commands/smi_identity.txt", "Failed to initialize NVML: Driver/library version mismatch\n[exit 18]"
        ),
        "gpu.answers",
        "FAIL",
        "",
    ),
    "a GPU of another kind": (edit_gpu_row("identity", 6, "H100 80GB HBM3", "H100 PCIe"), "gpu.model", "WARN", "GPU6"),
    "memory that an earlier job left": (edit_gpu_row("identity", 1, " 4,", " 9000,"), "gpu.busy", "WARN", "GPU1"),
    "memory too small for the run": (edit_gpu_row("identity", 1, "81559", "40960"), "gpu.headroom", "FAIL", "GPU1"),
    "a GPU that must be reset": (
        edit_gpu_row("identity", 3, " 4,", " [GPU requires reset],"),
        "gpu.answers",
        "FAIL",
        "GPU3",
    ),
    "a corrupted infoROM": (
        append_to_nvidia_smi_outputs("WARNING: infoROM is corrupted at gpu 0000:52:00.0\n[exit 14]"),
        "gpu.inforom",
        "WARN",
        "GPU2",
    ),
    "persistence mode off": (edit_gpu_row("state", 0, "Enabled", "Disabled"), "gpu.persistence", "WARN", "GPU0"),
    "MIG on": (edit_gpu_row("state", 3, ", Disabled,", ", Enabled,"), "gpu.mig", "FAIL", "GPU3"),
    "no process may compute": (edit_gpu_row("state", 3, "Default", "Prohibited"), "gpu.compute_mode", "FAIL", "GPU3"),
    "a lowered power limit": (edit_gpu_row("state", 7, "700.00", "500.00"), "gpu.power_limit", "WARN", "GPU7"),
    "too hot": (
        edit_gpu_row("state", 2, "Not Active, Not Active", "Active, Not Active"),
        "gpu.slowdown",
        "FAIL",
        "GPU2",
    ),
    "power brake": (
        edit_gpu_row("state", 2, "Not Active, Not Active", "Not Active, Active"),
        "gpu.slowdown",
        "FAIL",
        "GPU2",
    ),
    "uncorrectable ECC errors": (edit_gpu_row("ecc", 4, "0, 0", "0, 3"), "ecc.uncorrected", "FAIL", "GPU4"),
    "many corrected ECC errors": (edit_gpu_row("ecc", 4, "0, 0", "60000000, 0"), "ecc.corrected", "WARN", "GPU4"),
    "rows to be remapped": (
        edit_gpu_row("remapped", 2, "No, No", "Yes, No"),
        "ecc.remap_pending",
        "FAIL",
        "00000000:52:00.0",
    ),
    "no spare rows": (edit_gpu_row("remapped", 2, "No, No", "No, Yes"), "ecc.remap_failed", "FAIL", "00000000:52:00.0"),
    "an NVLink is down": (
        replace_text("commands/smi_nvlink.txt", "\t Link 5: 26.562 GB/s", "\t Link 5: <inactive>"),
        "nvlink.active",
        "FAIL",
        "GPU0",
    ),
    "an NVLink is missing": (
        replace_text("commands/smi_nvlink.txt", "\t Link 17: 26.562 GB/s\nGPU 1", "GPU 1"),
        "nvlink.count",
        "FAIL",
        "GPU0",
    ),
    "a slow NVLink": (
        replace_text("commands/smi_nvlink.txt", "Link 0: 26.562", "Link 0: 20.000"),
        "nvlink.speed",
        "FAIL",
        "GPU0",
    ),
    "errors of an NVLink": (
        replace_text("commands/smi_nvlink_errors.txt", "Link 3: CRC Errors: 0", "Link 3: CRC Errors: 7"),
        "nvlink.errors",
        "WARN",
        "GPU0",
    ),
    "recoveries of a link of Blackwell": (
        replace_text(
            "commands/smi_nvlink_errors.txt",
            "Link 3: CRC Errors: 0",
            "Link 3: Link recovery failed events: 2\n\t Link 3: Total link recovery events: 5",
        ),
        "nvlink.errors",
        "WARN",
        "GPU0",
    ),
    "discards of a link of Blackwell": (
        replace_text("commands/smi_nvlink_errors.txt", "Link 3: CRC Errors: 0", "Link 3: Tx discards: 9"),
        "nvlink.errors",
        "WARN",
        "GPU0",
    ),
    "no fabric manager": (
        overwrite_file("commands/fabric_manager.txt", "failed\n[exit 3]"),
        "nvlink.fabric_manager",
        "FAIL",
        "nvidia-fabricmanager",
    ),
    "a GPU that no NVLink joins": (lambda root: _remove_nvlinks(root, 7), "topology.nvlink", "FAIL", "GPU7"),
    "a card behind the CPU": (
        replace_text("commands/smi_topology.txt", "\tPXB\t", "\tNODE\t"),
        "topology.nic",
        "WARN",
        "GPU0",
    ),
    "a matrix that is cut off": (
        lambda root: _truncate(root / "commands/smi_topology.txt", 400),
        "topology.readable",
        "WARN",
        "",
    ),
    "a GPU on 8 lanes": (set_pci_attribute(GPU2, "current_link_width", "8"), "pcie.width", "FAIL", GPU2),
    "a card on 8 lanes": (set_pci_attribute(NIC3, "current_link_width", "8"), "pcie.width", "FAIL", NIC3),
    "a card at half the speed": (
        set_pci_attribute(NIC3, "current_link_speed", "16.0 GT/s PCIe"),
        "pcie.speed",
        "FAIL",
        NIC3,
    ),
    "a card at half the speed of its slot": (
        combine_edits(
            add_upstream_port(NIC3, "32.0 GT/s PCIe"), set_pci_attribute(NIC3, "current_link_speed", "16.0 GT/s PCIe")
        ),
        "pcie.speed",
        "FAIL",
        NIC3,
    ),
    "a GPU on half the lanes of its slot": (
        combine_edits(add_upstream_port(GPU2, "32.0 GT/s PCIe"), set_pci_attribute(GPU2, "current_link_width", "8")),
        "pcie.width",
        "FAIL",
        GPU2,
    ),
    "fatal PCIe errors": (set_pci_attribute(GPU2, "aer_dev_fatal", "TOTAL_ERR_FATAL 2"), "pcie.errors", "WARN", GPU2),
    "a BIOS without NUMA nodes": (set_pci_attribute(GPU2, "numa_node", "-1"), "pcie.numa", "WARN", GPU2),
    "PyTorch does not start": (
        overwrite_file("commands/torch.txt", "ModuleNotFoundError: No module named 'torch'\n[exit 1]"),
        "software.torch",
        "FAIL",
        "torch",
    ),
    "PyTorch hangs": (overwrite_file("commands/torch.txt", "[no answer]"), "software.torch", "FAIL", "torch"),
    "PyTorch sees no GPU": (
        replace_text("commands/torch.txt", '"gpus": 8', '"gpus": 0'),
        "software.cuda",
        "FAIL",
        "torch",
    ),
    "a driver too old for PyTorch": (
        replace_text("commands/torch.txt", '"error": null', '"error": "RuntimeError: The NVIDIA driver is too old"'),
        "software.cuda_starts",
        "FAIL",
        "torch",
    ),
    "no way from card to GPU": (
        combine_edits(
            overwrite_file("proc/modules", "nvidia 1 0"),
            replace_text("proc/driver/nvidia/version", "Open Kernel", "Kernel"),
        ),
        "software.peer_memory",
        "WARN",
        "nvidia_peermem",
    ),
    "a port is down": (
        combine_edits(set_rdma_port(4, "state", "1: DOWN"), set_rdma_port(4, "phys_state", "3: Disabled")),
        "rdma.state",
        "FAIL",
        "mlx5_4",
    ),
    "a port trains": (set_rdma_port(4, "state", "2: INIT"), "rdma.state", "FAIL", "mlx5_4"),
    "a slow port": (set_rdma_port(6, "rate", "200 Gb/sec (4X HDR)"), "rdma.rate", "FAIL", "mlx5_6"),
    "a link that flaps": (set_rdma_port(1, "counters/link_downed", "80"), "rdma.flaps", "WARN", "mlx5_1"),
    "old firmware": (
        overwrite_file("sys/class/infiniband/mlx5_5/fw_ver", "28.39.1002"),
        "rdma.firmware",
        "WARN",
        "mlx5_5",
    ),
    "a port with only a link-local address": (
        combine_edits(
            *(set_rdma_port(2, f"gids/{i}", "0000:0000:0000:0000:0000:0000:0000:0000") for i in (2, 3)),
            set_variable("NCCL_IB_GID_INDEX", "-1"),
        ),
        "roce.gid",
        "FAIL",
        "mlx5_2",
    ),
    "a GID of RoCE v1": (set_rdma_port(2, "gid_attrs/types/3", "IB/RoCE v1"), "roce.gid_index", "FAIL", "mlx5_2"),
    "another MTU": (overwrite_file("sys/class/net/ens3np0/mtu", "4200"), "mtu.same", "FAIL", "ens3np0"),
    "PCP is trusted": (
        replace_text("commands/mlnx_qos_ens1np0.txt", "state: dscp", "state: pcp"),
        "roce.trust",
        "FAIL",
        "ens1np0",
    ),
    "no PFC": (
        replace_text("commands/mlnx_qos_ens2np0.txt", "enabled     0   0   0   1", "enabled     0   0   0   0"),
        "roce.pfc",
        "FAIL",
        "ens2np0",
    ),
    "PFC on two priorities": (
        replace_text("commands/mlnx_qos_ens2np0.txt", "enabled     0   0   0   1", "enabled     1   0   0   1"),
        "roce.pfc",
        "FAIL",
        "ens2np0",
    ),
    "PFC on another priority": (
        combine_edits(
            replace_text(
                "commands/mlnx_qos_ens2np0.txt", "enabled     0   0   0   1   0", "enabled     0   0   0   0   1"
            ),
            lambda root: _enable_ecn(root, "ens2np0", 4),
        ),
        "roce.traffic_class",
        "FAIL",
        "ens2np0",
    ),
    "a DSCP of another priority": (
        replace_text(
            "commands/mlnx_qos_ens2np0.txt",
            "prio:3 dscp:31,30,29,28,27,26,25,24,",
            "prio:2 dscp:31,30,29,28,27,26,25,24,",
        ),
        "roce.traffic_class",
        "FAIL",
        "ens2np0",
    ),
    "no ECN where packets come": (
        overwrite_file("sys/class/net/ens0np0/ecn/roce_np/enable/3", "0"),
        "roce.ecn",
        "FAIL",
        "ens0np0",
    ),
    "no ECN where they are sent": (
        overwrite_file("sys/class/net/ens0np0/ecn/roce_rp/enable/3", "0"),
        "roce.ecn",
        "FAIL",
        "ens0np0",
    ),
    "CNPs among the data": (
        overwrite_file("sys/class/net/ens0np0/ecn/roce_np/cnp_802p_prio", "3"),
        "roce.cnp",
        "WARN",
        "ens0np0",
    ),
    "mlnx_qos says nothing": (
        overwrite_file("commands/mlnx_qos_ens5np0.txt", "Interface ens5np0 is not supported"),
        "roce.readable",
        "WARN",
        "ens5np0",
    ),
    "mlnx_qos hangs": (
        overwrite_file("commands/mlnx_qos_ens0np0.txt", "[no answer]"),
        "doctor.stuck",
        "FAIL",
        "mlnx_qos -i ens0np0",
    ),
    "a slow cable": (overwrite_file("sys/class/net/eno1/speed", "100"), "network.speed", "WARN", "eno1"),
    "half duplex": (overwrite_file("sys/class/net/eno1/duplex", "half"), "network.duplex", "WARN", "eno1"),
    "an interface that only begins as one that is there": (
        combine_edits(create_file("sys/class/net/bonding_masters", ""), set_variable("NCCL_SOCKET_IFNAME", "bond")),
        "nccl.interface",
        "FAIL",
        "NCCL_SOCKET_IFNAME",
    ),
    "an interface that is not there": (
        set_variable("NCCL_SOCKET_IFNAME", "bond0"),
        "nccl.interface",
        "FAIL",
        "NCCL_SOCKET_IFNAME",
    ),
    "gloo is given the beginning of a name": (
        set_variable("GLOO_SOCKET_IFNAME", "eno"),
        "nccl.gloo_interface",
        "FAIL",
        "GLOO_SOCKET_IFNAME",
    ),
    "gloo is given NCCL's grammar": (
        set_variable("GLOO_SOCKET_IFNAME", "^lo"),
        "nccl.gloo_interface",
        "FAIL",
        "GLOO_SOCKET_IFNAME",
    ),
    "gloo is given one more than is there": (
        set_variable("GLOO_SOCKET_IFNAME", "eno1,eno2"),
        "nccl.gloo_interface",
        "FAIL",
        "GLOO_SOCKET_IFNAME",
    ),
    "only docker's interface": (
        set_variable("NCCL_SOCKET_IFNAME", "docker0"),
        "nccl.interface_local",
        "FAIL",
        "NCCL_SOCKET_IFNAME",
    ),
    "gloo on the loopback": (
        set_variable("GLOO_SOCKET_IFNAME", "lo"),
        "nccl.interface_local",
        "FAIL",
        "GLOO_SOCKET_IFNAME",
    ),
    "docker's interface too": (
        combine_edits(
            set_variable("NCCL_SOCKET_IFNAME", "^lo"), overwrite_file("sys/class/net/docker0/operstate", "up")
        ),
        "nccl.interface_local",
        "FAIL",
        "NCCL_SOCKET_IFNAME",
    ),
    "the interface is down": (
        overwrite_file("sys/class/net/eno1/operstate", "down"),
        "nccl.interface_up",
        "FAIL",
        "NCCL_SOCKET_IFNAME",
    ),
    "the route is another": (
        replace_text("commands/route.txt", "dev eno1", "dev ens0np0"),
        "nccl.route",
        "WARN",
        "ens0np0",
    ),
    "a card that is not there": (
        set_variable("NCCL_IB_HCA", "=" + ",".join(f"mlx5_{card}" for card in (*range(8), 9))),
        "nccl.hca",
        "FAIL",
        "mlx5_9",
    ),
    "RDMA switched off by a file of NCCL": (
        create_file("etc/nccl.conf", "# left by a test\nNCCL_IB_DISABLE=1"),
        "nccl.left_over",
        "WARN",
        "NCCL_IB_DISABLE",
    ),
    "a card that is not there, by the user's file of NCCL": (
        combine_edits(
            unset_variable("NCCL_IB_HCA"),
            create_file("etc/nccl.conf", "NCCL_IB_HCA=mlx5"),
            create_file("~/.nccl.conf", "NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_9"),
        ),
        "nccl.hca",
        "FAIL",
        "mlx5_9",
    ),
    "RDMA switched off": (set_variable("NCCL_IB_DISABLE", "1"), "nccl.left_over", "WARN", "NCCL_IB_DISABLE"),
    "P2P switched off": (set_variable("NCCL_P2P_DISABLE", "1"), "nccl.left_over", "WARN", "NCCL_P2P_DISABLE"),
    "NCCL fell back to sockets": (
        replace_text(
            "nccl.log",
            "node2:3811:3902 [0] NCCL INFO Using network IB",
            "node2:3811:3902 [0] NCCL INFO NET/IB : No device found.\n"
            "node2:3811:3902 [0] NCCL INFO Using network Socket",
        ),
        "nccl.fallback",
        "FAIL",
        "node2",
    ),
    "NCCL fell back, in the log of torchrun": (
        combine_edits(
            replace_text("nccl.log", "[0] NCCL INFO Using network IB", "[0] NCCL INFO Using network Socket"),
            replace_text("nccl.log", "node", "[default0]:node", -1),
        ),
        "nccl.fallback",
        "FAIL",
        "node1",
    ),
    "one rank of a host fell back, and a later one did not": (
        replace_text(
            "nccl.log",
            "node2:3811:3902 [0] NCCL INFO Using network IB",
            "node2:3812:3903 [1] NCCL INFO Using network Socket\nnode2:3811:3902 [0] NCCL INFO Using network IB",
        ),
        "nccl.fallback",
        "FAIL",
        "node2",
    ),
    "two versions of an NCCL that names no host": (
        combine_edits(
            replace_text("nccl.log", "node1:4021:4021 [0] NCCL INFO NCCL version", "0: NCCL version"),
            replace_text(
                "nccl.log",
                "node2:3811:3902 [0] NCCL INFO NCCL version 2.26.2+cuda12.8",
                "8: NCCL version 2.21.5+cuda12.4",
            ),
        ),
        "nccl.version",
        "FAIL",
        "",
    ),
    "no GPUDirect": (
        replace_text("nccl.log", "[send] via NET/IB/0/GDRDMA", "[send] via NET/IB/0"),
        "nccl.gdr",
        "WARN",
        "",
    ),
    "NCCL warns": (
        append_line(
            "nccl.log", "node2:3811:3902 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion with error 12"
        ),
        "nccl.warnings",
        "WARN",
        "node2",
    ),
    "another NCCL": (
        replace_text(
            "nccl.log",
            "node2:3811:3902 [0] NCCL INFO NCCL version 2.26.2",
            "node2:3811:3902 [0] NCCL INFO NCCL version 2.21.5",
        ),
        "nccl.version",
        "FAIL",
        "node2",
    ),
    "a limit on locked memory": (
        replace_text("proc/self/limits", "memory         unlimited", "memory         65536"),
        "host.memlock",
        "FAIL",
        "memlock",
    ),
    "docker's shared memory": (
        replace_text("commands/df_shm.txt", "1056706176 0 1056706176", "65536 0 65536"),
        "host.shm",
        "FAIL",
        "/dev/shm",
    ),
    "shared memory that was left": (
        replace_text("commands/df_shm.txt", "0 1056706176", "1056000000 706176"),
        "host.shm_free",
        "WARN",
        "/dev/shm",
    ),
    "a disk that fills": (replace_text("commands/df_runs.txt", "20%", "88%"), "disk.full", "WARN", "."),
    "a full disk": (replace_text("commands/df_runs.txt", "20%", "97%"), "disk.very_full", "FAIL", "."),
    "no room for checkpoints": (
        replace_text("commands/df_runs.txt", "6000898765", "600089876"),
        "disk.room",
        "FAIL",
        ".",
    ),
    "a slow disk": (overwrite_file("commands/write.txt", "268435456 bytes in 9.9000 s"), "disk.write", "WARN", "."),
    "a disk that hangs": (
        overwrite_file("commands/write.txt", "[no answer]"),
        "doctor.stuck",
        "FAIL",
        "phalanx.doctor.disk_write_probe",
    ),
    "a read-only disk": (
        overwrite_file("commands/write.txt", "OSError: [Errno 30] Read-only file system: '/data'\n[exit 1]"),
        "disk.writable",
        "FAIL",
        ".",
    ),
    "little memory": (
        replace_text("proc/meminfo", "MemAvailable:   2040109465", "MemAvailable:   104010946"),
        "memory.available",
        "WARN",
        "",
    ),
    "a job's limit that is nearly used": (
        combine_edits(
            create_file("proc/self/cgroup", "0::/slurm/job_7/step_0"),
            create_file("sys/fs/cgroup/slurm/job_7/memory.max", "100000000000"),
            create_file("sys/fs/cgroup/slurm/job_7/memory.current", "95000000000"),
        ),
        "memory.available",
        "WARN",
        "",
    ),
    "the same by cgroups of version 1": (
        combine_edits(
            create_file("proc/self/cgroup", "9:cpu,cpuacct:/\n4:memory:/slurm/job_7"),
            create_file("sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", "100000000000"),
            create_file("sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes", "95000000000"),
        ),
        "memory.available",
        "WARN",
        "",
    ),
    "a clock on its own": (
        replace_text("commands/chrony.txt", ": Normal", ": Not synchronised"),
        "clock.synchronized",
        "WARN",
        "",
    ),
    "a clock that is off": (replace_text("commands/chrony.txt", "0.000012931", "45.2"), "clock.offset", "FAIL", ""),
    "cores that save power": (
        overwrite_file("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave"),
        "cpu.governor",
        "WARN",
        "cpu1",
    ),
    "cores switched off": (
        lambda root: (root / "sys/devices/system/cpu/offline").write_text("3-5\n"),
        "cpu.offline",
        "WARN",
        "3-5",
    ),
    "NUMA balancing": (overwrite_file("proc/sys/kernel/numa_balancing", "1"), "cpu.numa_balancing", "WARN", ""),
    "an Xid of hardware": (append_xid(48), "kernel.xid", "FAIL", GPU2),
    "an Xid of a MIG instance": (
        append_line(KERNEL_LOG_FILE, "NVRM: Xid (PCI:0000:52:00 GPU-I:05): 94, pid=4021, name=python, Contained: SM"),
        "kernel.xid",
        "FAIL",
        GPU2,
    ),
    "an Xid in the journal, where dmesg may not be read": (
        combine_edits(
            overwrite_file(KERNEL_LOG_FILE, "dmesg: read kernel buffer failed: Operation not permitted\n[exit 1]"),
            create_file("commands/kernel_journal.txt", "NVRM: Xid (PCI:0000:52:00): 48, pid=4021, name=python"),
        ),
        "kernel.xid",
        "FAIL",
        GPU2,
    ),
    "an Xid that only the journal still has": (
        create_file("commands/kernel_journal.txt", "NVRM: Xid (PCI:0000:52:00): 48, pid=4021, name=python"),
        "kernel.xid",
        "FAIL",
        GPU2,
    ),
    "an Xid, where the journal hangs": (
        combine_edits(append_xid(48), create_file("commands/kernel_journal.txt", "[no answer]")),
        "kernel.xid",
        "FAIL",
        GPU2,
    ),
    "an ECC error that was not recovered": (
        append_line(KERNEL_LOG_FILE, "NVRM: Xid (PCI:0000:52:00): 140, pid=4021, name=python, Unrecovered ECC Error"),
        "kernel.xid",
        "FAIL",
        GPU2,
    ),
    "an error of Blackwell's NVLinks": (
        append_line(KERNEL_LOG_FILE, "NVRM: Xid (PCI:0000:52:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 05"),
        "kernel.xid",
        "FAIL",
        GPU2,
    ),
    "a GPU that asks for a reboot": (
        append_line(
            KERNEL_LOG_FILE,
            "NVRM: Xid (PCI:0000:52:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 "
            "(Node Reboot Required)",
        ),
        "kernel.xid",
        "FAIL",
        GPU2,
    ),
    "an Xid of a program": (append_xid(31), "kernel.xid_software", "WARN", GPU2),
    "a GPU fell off the bus": (
        combine_edits(
            append_line(KERNEL_LOG_FILE, "NVRM: GPU at PCI:0000:52:00: GPU-5cf1f6c5"),
            append_line(
                KERNEL_LOG_FILE,
                "NVRM: Xid (PCI:0000:52:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            ),
        ),
        "kernel.gpu_lost",
        "FAIL",
        GPU2,
    ),
    "a GPU fell off the bus, without an Xid": (
        append_line(KERNEL_LOG_FILE, "NVRM: GPU 0000:52:00.0: GPU has fallen off the bus."),
        "kernel.gpu_lost",
        "FAIL",
        GPU2,
    ),
    "an NVSwitch failed": (
        append_line(KERNEL_LOG_FILE, "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 24007, Fatal, Link 46 sourcing error"),
        "kernel.sxid",
        "FAIL",
        "nvidia-nvswitch0",
    ),
    "a limited card": (
        append_line(
            KERNEL_LOG_FILE,
            f"pci {NIC3}: 126.016 Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x8 link at 0000:5d:00.0",
        ),
        "kernel.pcie_limited",
        "WARN",
        NIC3,
    ),
    "a GPU on half of its lanes": (
        append_line(
            KERNEL_LOG_FILE,
            f"pci {GPU2}: 16.000 Gb/s available PCIe bandwidth, limited by 2.5 GT/s PCIe x8 link at "
            "0000:4e:01.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)",
        ),
        "kernel.pcie_limited",
        "WARN",
        GPU2,
    ),
    "uncorrected PCIe errors, as AER's driver says it": (
        append_line(
            KERNEL_LOG_FILE, f"nvidia {GPU2}: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer"
        ),
        "kernel.aer",
        "FAIL",
        GPU2,
    ),
    "uncorrected PCIe errors": (
        append_line(
            KERNEL_LOG_FILE, f"nvidia {GPU2}: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer"
        ),
        "kernel.aer",
        "FAIL",
        GPU2,
    ),
    "a machine check": (
        append_line(KERNEL_LOG_FILE, "mce: [Hardware Error]: Machine check events logged"),
        "kernel.machine_check",
        "WARN",
        "",
    ),
    "memory errors of the host": (
        append_line(KERNEL_LOG_FILE, "EDAC MC3: 1 CE memory read error on CPU_SrcID#0_MC#3_Chan#0_DIMM#0"),
        "kernel.machine_check",
        "WARN",
        "MC3",
    ),
    "a program killed for memory": (
        append_line(KERNEL_LOG_FILE, "Out of memory: Killed process 4711 (python) total-vm:9000kB"),
        "kernel.out_of_memory",
        "WARN",
        "python",
    ),
    "a program killed for its job's memory": (
        append_line(KERNEL_LOG_FILE, "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9000kB"),
        "kernel.out_of_memory",
        "WARN",
        "python",
    ),
    "the same by an old kernel": (
        append_line(KERNEL_LOG_FILE, "Out of memory: Kill process 4711 (python) score 900 or sacrifice child"),
        "kernel.out_of_memory",
        "WARN",
        "python",
    ),
    "XFS shut down": (
        append_line(
            KERNEL_LOG_FILE,
            "XFS (dm-0): Log I/O Error (0x2) detected at xlog_ioend_work+0x59/0x60 [xfs] "
            "(fs/xfs/xfs_log.c:1378).  Shutting down filesystem.",
        ),
        "kernel.disk",
        "FAIL",
        "dm-0",
    ),
    "a disk with errors": (
        append_line(KERNEL_LOG_FILE, "I/O error, dev nvme1n1, sector 2048 op 0x0:(READ)"),
        "kernel.disk",
        "FAIL",
        "nvme1n1",
    ),
    "a file system made read-only": (
        append_line(KERNEL_LOG_FILE, "EXT4-fs (nvme0n1p2): Remounting filesystem read-only"),
        "kernel.disk",
        "FAIL",
        "nvme0n1p2",
    ),
}
"""Edits of the snapshot, and the single finding that they cause: id, severity, device."""
ALL_NIC_FAULTS: dict[str, tuple[SnapshotEdit, str, str]] = {
    "mlnx_qos has another format": (
        edit_all_nics(lambda nic: overwrite_file(f"commands/mlnx_qos_ens{nic}np0.txt", "QoS: none")),
        "roce.readable",
        "WARN",
    ),
    "an MTU of 1500": (
        edit_all_nics(lambda card: overwrite_file(f"sys/class/net/ens{card}np0/mtu", "1500")),
        "mtu.large",
        "WARN",
    ),
    "NCCL_IB_TC unset": (set_variable("NCCL_IB_TC", "0"), "roce.traffic_class", "FAIL"),
    "NCCL_IB_TC of another DSCP": (set_variable("NCCL_IB_TC", "26"), "roce.traffic_class", "FAIL"),
    "slower than the run counts on": (
        edit_all_nics(lambda card: set_rdma_port(card, "rate", "200 Gb/sec (4X HDR)")),
        "rdma.rate",
        "FAIL",
    ),
    "a wrong GID index": (set_variable("NCCL_IB_GID_INDEX", "7"), "roce.gid_index", "FAIL"),
}
"""Faults of all eight NICs."""


def _remove_nvlinks(root: Path, gpu: int) -> None:
    """Remove all NVLinks from one GPU to the others."""
    path = root / "commands/smi_topology.txt"
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    for i in range(8):
        if i != gpu:
            lines[1 + i][1 + gpu] = lines[1 + gpu][1 + i] = "SYS"
    path.write_text("\n".join("\t".join(line) for line in lines) + "\n")


def _truncate(path: Path, size: int) -> None:
    path.write_text(path.read_text()[:size])


def _enable_ecn(root: Path, interface: str, priority: int) -> None:
    for role in ("roce_np", "roce_rp"):
        (root / f"sys/class/net/{interface}/ecn/{role}/enable/{priority}").write_text("1\n")


def find_problems(root: Path, expected: Expectations = EXPECTED) -> list[DoctorFinding]:
    return [finding for finding in run_all_checks(Machine(root), expected) if finding.severity in ("WARN", "FAIL")]


def test_doctor_passes_every_rule_on_healthy_h100_node(h100: Path) -> None:
    set_variable("GLOO_SOCKET_IFNAME", "eno1")(h100)
    findings = run_all_checks(Machine(h100), EXPECTED)
    assert find_problems(h100) == []
    assert {finding.host for finding in findings} == {"node1"}
    passed = {finding.id for finding in findings if finding.severity == "OK"}
    rules = {rule.id for check in CHECKS for rule in SECTIONS[check].rules}
    assert rules - passed == {"memory.headroom", "cpu.bf16"}  # these rules are for CPUs


@pytest.mark.parametrize("name", FAULTS)
def test_doctor_reports_fault_with_device_and_remedy(name: str, h100: Path) -> None:
    plant, rule, severity, device = FAULTS[name]
    plant(h100)
    (problem,) = find_problems(h100)
    of_log = rule in {log_rule.id for log_rule in SECTIONS["nccl_log"].rules}  # the log contains all hosts of a run
    assert (problem.id, problem.severity, problem.host) == (rule, severity, device if of_log and device else "node1")
    assert device in problem.device if rule == "doctor.stuck" else problem.device == device
    assert problem.remedy
    assert problem.command
    assert problem.source
    assert "{" not in problem.remedy


@pytest.mark.parametrize("name", ALL_NIC_FAULTS)
def test_doctor_reports_fault_on_every_nic(name: str, h100: Path) -> None:
    plant, rule, severity = ALL_NIC_FAULTS[name]
    plant(h100)
    findings = find_problems(h100)
    assert {(finding.id, finding.severity) for finding in findings} == {(rule, severity)}
    assert len({finding.device for finding in findings}) == 8


def test_doctor_skips_roce_checks_on_infiniband(h100: Path) -> None:
    for path in h100.glob("sys/class/infiniband/*/ports/1/link_layer"):
        path.write_text("InfiniBand\n")
    assert find_problems(h100) == []
    severities = {finding.id: finding.severity for finding in run_all_checks(Machine(h100), EXPECTED)}
    assert (severities["roce"], severities["roce_gid"], severities["mtu"], severities["rdma.rate"]) == (
        "SKIP",
        "SKIP",
        "SKIP",
        "OK",
    )
    (h100 / "sys/class/infiniband/mlx5_3/ports/1/phys_state").write_text("2: Polling\n")
    (found_one,) = find_problems(h100)
    assert (found_one.id, found_one.device) == ("rdma.state", "mlx5_3")


def test_doctor_fault_table_covers_every_rule() -> None:
    broken = {fault[1] for fault in (*FAULTS.values(), *ALL_NIC_FAULTS.values())}
    rules = {rule.id for check in CHECKS for rule in SECTIONS[check].rules}
    assert rules - broken == {"memory.headroom", "cpu.bf16"}


@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        ("flags\t\t: fpu avx avx2 fma sha_ni", True),
        ("flags\t\t: fpu avx2 avx512f avx512dq avx512bw avx512vl", False),
        ("Features\t: fp asimd sve", True),
        ("Features\t: fp asimd bf16 sve", False),
        ("model name\t: of unknown flags", False),
    ],
)
def test_doctor_warns_about_bf16_on_cpu_without_vector_support(flags: str, slow: bool, h100: Path) -> None:
    create_file("proc/cpuinfo", f"processor\t: 0\n{flags}")(h100)
    on_cpus = replace(EXPECTED, gpus=0, rank_bytes=2**30, network_bytes_per_second=None, precision="bf16")
    findings = find_problems(h100, on_cpus)
    assert [(finding.id, finding.severity) for finding in findings] == ([("cpu.bf16", "WARN")] if slow else [])
    assert all('training.precision = "fp32"' in finding.remedy for finding in findings)
    for expectations in (
        replace(on_cpus, precision="fp32"),
        replace(EXPECTED, precision="bf16"),
    ):  # on CPUs with fp32, and on GPUs
        assert find_problems(h100, expectations) == []


def test_doctor_checks_memory_headroom_of_cpu_run(h100: Path) -> None:
    too_much = replace(EXPECTED, gpus=0, rank_bytes=300 * 2**30)
    assert "memory.headroom" in {finding.id for finding in find_problems(h100, too_much)}
    assert "memory.headroom" not in {finding.id for finding in find_problems(h100, replace(too_much, rank_bytes=2**30))}
