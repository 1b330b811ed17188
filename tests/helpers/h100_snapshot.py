"""Snapshot of a machine like a DGX H100 with a RoCE network: 8 GPUs behind NVSwitches, each with a NIC of 400 Gb/s on
its PCIe switch, and one more interface for the host.

It is written by hand from documented formats (manuals of nvidia-smi and mlnx_qos, Linux's sysfs ABI, NCCL's log).
The matrix of `nvidia-smi topo -m` is that of the NVIDIA DGX H100 User Guide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

GPUS = [f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")]
NICS = [f"0000:{bus}:00.0" for bus in ("18", "40", "4f", "5e", "9a", "c0", "ce", "dc")]
NVSWITCH = "0000:07:00.0"
GPU_NAME = "NVIDIA H100 80GB HBM3"
MLNX_QOS = """\
DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
  prio:0 dscp:07,06,05,04,03,02,01,00,
  prio:1 dscp:15,14,13,12,11,10,09,08,
  prio:2 dscp:23,22,21,20,19,18,17,16,
  prio:3 dscp:31,30,29,28,27,26,25,24,
  prio:4 dscp:39,38,37,36,35,34,33,32,
  prio:5 dscp:47,46,45,44,43,42,41,40,
  prio:6 dscp:55,54,53,52,51,50,49,48,
  prio:7 dscp:63,62,61,60,59,58,57,56,
default priority:
Receive buffer size (bytes): 20016,156096,0,0,0,0,0,0,max_buffer_size=1027728
Cable len: 7
PFC configuration:
  priority    0   1   2   3   4   5   6   7
  enabled     0   0   0   1   0   0   0   0
  buffer      0   0   0   1   0   0   0   0
tc: 0 ratelimit: unlimited, tsa: vendor
   priority:  1
"""
ETHTOOL = """\
NIC statistics:
     rx_prio3_pause: 0
     tx_prio3_pause: 0
     rx_discards_phy: 0
"""
KERNEL_LOG = """\
Linux version 6.8.0-60-generic (buildd@lcy02-amd64-054) (x86_64-linux-gnu-gcc-13)
pci 0000:1b:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint
NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build
nvidia-nvswitch0: open (major=510)
mlx5_core 0000:18:00.0: firmware version: 28.42.1000
mlx5_core 0000:18:00.0: 504.112 Gb/s available PCIe bandwidth (32.0 GT/s PCIe x16 link)
EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode
"""
PROCESS_LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
CHRONY = """\
Reference ID    : 0A000001 (10.0.0.1)
Stratum         : 3
System time     : 0.000012931 seconds slow of NTP time
Last offset     : -0.000004315 seconds
Leap status     : Normal
"""
ENVIRONMENT = """\
MASTER_ADDR=10.0.0.2
NCCL_IB_GID_INDEX=3
NCCL_IB_HCA=mlx5
NCCL_IB_TC=106
NCCL_SOCKET_IFNAME=eno
"""
NCCL_LOG = """\
node1:4021:4021 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eno
node1:4021:4021 [0] NCCL INFO Bootstrap : Using eno1:10.0.0.1<0>
node1:4021:4021 [0] NCCL INFO NCCL version 2.26.2+cuda12.8
node1:4021:4102 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eno1:10.0.0.1<0>
node1:4021:4102 [0] NCCL INFO Using network IB
node1:4021:4102 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
node2:3811:3902 [0] NCCL INFO NCCL version 2.26.2+cuda12.8
node2:3811:3902 [0] NCCL INFO Using network IB
node2:3811:3902 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""
DF_HEADER = "Filesystem 1024-blocks Used Available Capacity Mounted on"
COMMON_FILES = {
    "environment": ENVIRONMENT,
    "nccl.log": NCCL_LOG,
    "proc/sys/kernel/hostname": "node1",
    "proc/sys/kernel/osrelease": "6.8.0-60-generic",
    "proc/sys/kernel/numa_balancing": "0",
    "sys/devices/system/cpu/offline": "",
    "sys/devices/system/cpu/present": "0-111",
    "sys/devices/system/cpu/smt/control": "on",
    **{f"dev/nvidia{i}": "" for i in range(8)},
    "proc/self/limits": PROCESS_LIMITS,
    "proc/meminfo": "MemTotal:       2113412352 kB\nMemFree:        1992294400 kB\nMemAvailable:   2040109465 kB",
    "proc/uptime": "864000.00 190000000.00",
    "proc/modules": "nvidia_peermem 16384 0 - Live 0x0000000000000000",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build",
    "proc/net/snmp": "Tcp: RtoAlgorithm OutSegs RetransSegs\nTcp: 1 100000 3",
    "sys/class/net/eno1/operstate": "up",
    "sys/class/net/eno1/mtu": "1500",
    "sys/class/net/eno1/speed": "10000",
    "sys/class/net/eno1/duplex": "full",
    "sys/class/net/lo/operstate": "unknown",
    "sys/class/net/docker0/operstate": "down",
    "commands/df_shm.txt": f"{DF_HEADER}\ntmpfs 1056706176 0 1056706176 0% /dev/shm",
    "commands/df_runs.txt": f"{DF_HEADER}\n/dev/nvme0n1p2 7501123456 1500224691 6000898765 20% /",
    "commands/write.txt": "268435456 bytes in 0.1342 s",
    "commands/chrony.txt": CHRONY,
    "commands/kernel_log.txt": KERNEL_LOG,
    "commands/route.txt": "10.0.0.2 dev eno1 src 10.0.0.1 uid 0\n    cache",
    "commands/fabric_manager.txt": "active",
}


def write_h100_snapshot(root: Path) -> None:
    """Write all files of the snapshot."""
    files = {**COMMON_FILES, **_pci_files(), **_nvidia_smi_outputs(), **_torch_output()}
    for card, address in enumerate(NICS):
        files |= _nic_files(card, address)
    for node in (0, 1):
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{56 * node}-{56 * node + 55}"
        files[f"sys/devices/system/cpu/cpu{node}/cpufreq/scaling_governor"] = "performance"
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.rstrip("\n") + "\n")


def _pci_files() -> dict[str, str]:
    kinds = [(GPUS, "0x10de", "0x030200"), (NICS, "0x15b3", "0x020000"), ([NVSWITCH], "0x10de", "0x068000")]
    files = {}
    for addresses, vendor, kind in kinds:
        for i, address in enumerate(addresses):
            values = {
                "vendor": vendor,
                "class": kind,
                "numa_node": str(i // 4),
                "max_link_width": "16",
                "current_link_width": "16",
                "max_link_speed": "32.0 GT/s PCIe",
                "current_link_speed": "32.0 GT/s PCIe",
                "aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 0",
                "aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0",
            }
            files |= {f"sys/bus/pci/devices/{address}/{name}": value for name, value in values.items()}
    for address in GPUS:  # at rest they run slower
        files[f"sys/bus/pci/devices/{address}/driver/module/version"] = "570.124.06"
        files[f"sys/bus/pci/devices/{address}/current_link_speed"] = "2.5 GT/s PCIe"
    return files


def _nic_files(number: int, address: str) -> dict[str, str]:
    device, interface = f"mlx5_{number}", f"ens{number}np0"
    root, port = f"sys/class/infiniband/{device}", f"sys/class/infiniband/{device}/ports/1"
    gids = ["fe80:0000:0000:0000:a288:c2ff:fe00:0001"] * 2 + ["0000:0000:0000:0000:0000:ffff:0a01:0001"] * 2
    errors = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors")
    lost = (
        "out_of_sequence",
        "packet_seq_err",
        "local_ack_timeout_err",
        "rnr_nak_retry_err",
        "np_ecn_marked_roce_packets",
    )
    return {
        f"{root}/fw_ver": "28.42.1000",
        f"{root}/board_id": "MT_0000000838",
        f"{root}/device/uevent": f"DRIVER=mlx5_core\nPCI_SLOT_NAME={address}",
        f"{root}/device/net/{interface}/mtu": "9000",
        f"{port}/state": "4: ACTIVE",
        f"{port}/phys_state": "5: LinkUp",
        f"{port}/rate": "400 Gb/sec (4X NDR)",
        f"{port}/link_layer": "Ethernet",
        **{f"{port}/gids/{i}": gid for i, gid in enumerate([*gids, "0000:0000:0000:0000:0000:0000:0000:0000"])},
        **{f"{port}/gid_attrs/types/{i}": kind for i, kind in enumerate(["IB/RoCE v1", "RoCE v2"] * 2)},
        **{f"{port}/counters/{name}": "0" for name in errors},
        f"{port}/counters/port_rcv_packets": "1000000",
        **{f"{port}/hw_counters/{name}": "0" for name in lost},
        f"sys/class/net/{interface}/mtu": "9000",
        f"sys/class/net/{interface}/operstate": "up",
        f"sys/class/net/{interface}/ecn/roce_np/enable/3": "1",
        f"sys/class/net/{interface}/ecn/roce_rp/enable/3": "1",
        f"sys/class/net/{interface}/ecn/roce_np/cnp_802p_prio": "6",
        f"sys/class/net/{interface}/device/vendor": "0x15b3",
        f"sys/class/net/{interface}/statistics/rx_errors": "0",
        f"commands/mlnx_qos_{interface}.txt": MLNX_QOS,
        f"commands/ethtool_{interface}.txt": ETHTOOL,
    }


def _csv_table(head: str, row: Callable[[int], str]) -> str:
    return "\n".join([head, *map(row, range(8))])


def _nvidia_smi_outputs() -> dict[str, str]:
    identity = "index, name, pci.bus_id, memory.total [MiB], memory.used [MiB], driver_version, vbios_version"
    state = (
        "index, persistence_mode, mig.mode.current, compute_mode, power.limit [W], power.default_limit [W], "
        "clocks_event_reasons.hw_thermal_slowdown, clocks_event_reasons.hw_power_brake_slowdown"
    )
    ecc = "index, ecc.errors.corrected.volatile.total, ecc.errors.uncorrected.volatile.total"
    title = (f"GPU {i}: {GPU_NAME} (UUID: GPU-00000000-0000-0000-0000-00000000000{i})" for i in range(8))
    links = [[head, *(f"\t Link {link}: 26.562 GB/s" for link in range(18))] for head in title]
    kinds = ("Replay", "Recovery", "CRC")
    errors = [[head[0], *(f"\t Link {i}: {kind} Errors: 0" for i in range(18) for kind in kinds)] for head in links]
    bus = [f"0000{address.upper()}" for address in GPUS]
    rows = [
        [" X " if i == j else "NV18" for j in range(8)] + [_topology_link(i, j) for j in range(8)] for i in range(8)
    ]
    devices = [f"GPU{i}" for i in range(8)] + [f"NIC{i}" for i in range(8)]
    topology = ["\t".join(["", *devices, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    topology += [
        "\t".join([f"GPU{i}", *row, f"{56 * (i // 4)}-{56 * (i // 4) + 55}", str(i // 4), "N/A"])
        for i, row in enumerate(rows)
    ]
    topology += ["", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # NVLinks"]
    topology += ["", "NIC Legend:", "", *(f"  NIC{i}: mlx5_{i}" for i in range(8))]
    outputs = {
        "identity": _csv_table(identity, lambda i: f"{i}, {GPU_NAME}, {bus[i]}, 81559, 4, 570.124.06, 96.00.89.00.01"),
        "state": _csv_table(
            state, lambda i: f"{i}, Enabled, Disabled, Default, 700.00, 700.00, Not Active, Not Active"
        ),
        "ecc": _csv_table(ecc, lambda i: f"{i}, 0, 0"),
        "remapped": _csv_table(
            "gpu_bus_id, remapped_rows.pending, remapped_rows.failure", lambda i: f"{bus[i]}, No, No"
        ),
        "names": _csv_table("index, name", lambda i: f"{i}, {GPU_NAME}"),
        "facts": _csv_table(
            "index, driver_version, vbios_version, name, memory.total [MiB]",
            lambda i: f"{i}, 570.124.06, 96.00.89.00.01, {GPU_NAME}, 81559",
        ),
        "uncorrected": _csv_table("index, ecc.errors.uncorrected.volatile.total", lambda i: f"{i}, 0"),
        "nvlink": "\n".join(line for gpu in links for line in gpu),
        "nvlink_errors": "\n".join(line for gpu in errors for line in gpu),
        "topology": "\n".join(topology),
    }
    return {f"commands/smi_{name}.txt": text for name, text in outputs.items()}


def _topology_link(gpu: int, card: int) -> str:
    return "PXB" if gpu == card else "NODE" if gpu // 4 == card // 4 else "SYS"


def _torch_output() -> dict[str, str]:
    facts = {"torch": "2.7.0+cu128", "cuda": "12.8", "gpus": 8, "nccl": "2.26.2", "error": None}
    return {"commands/torch.txt": json.dumps(facts)}
