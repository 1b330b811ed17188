"""Description of the machines of a run."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from phalanx.spec.base import LocalPath, Spec

CalibratedPrecision = Literal["bf16", "fp32", "fp64"]
DEFAULT_DEVICES_PER_NODE = 8
"""Devices of a node if neither option nor run file sets them."""


class Generation(NamedTuple):
    """Values of a generation of devices that neither the machine nor a table of runs states."""

    matmul_efficiency: float
    """Fraction of the peak that matrix products reach at most, measured by stas00/ml-engineering (MAMF)."""
    host_link_bytes_per_second: float
    """Between a device and CPU memory per direction: PCIe with 16 lanes of 16 or 32 GT/s in 128b/130b."""
    host_bytes_per_second: float
    """A device's share of CPU memory bandwidth: two memory channels.

    The eight devices of a DGX share sixteen channels; a workstation has two.
    """
    network_bytes_per_second: float
    """Network bandwidth per device: 200 or 400 Gb/s."""


GENERATIONS = (
    # Ampere and older; A100: PCIe Gen4, DDR4-3200.
    Generation(0.87, 31.5e9, 51.2e9, 25e9),
    # Hopper; H100: PCIe Gen5, DDR5-4800.
    Generation(0.80, 63e9, 76.8e9, 50e9),
    # Blackwell; B200: PCIe Gen5, DDR5-5600.
    Generation(0.775, 63e9, 89.6e9, 50e9),
)
"""Generations of devices, with the values of a DGX. One without fitted constants (`cost/estimate/constants.py`) has
those of the one before."""


class CalibrationSpec(Spec):
    """Results of runs on a machine, which replace those of published runs."""

    runs: int = Field(gt=0)
    """Number of runs."""
    precision: CalibratedPrecision
    """Precision of the runs. The calibration applies to this precision only."""
    time_constants: dict[str, float]
    """Constants of step times (`phalanx.cost.estimate.constants`) that differ from those of published runs."""
    identified_constants: list[str]
    """The constants in `time_constants` that the runs determine. The others keep the values of published runs, or
    assumed values."""
    log_half_width: float = Field(gt=0)
    """Half-width, as a logarithm, of the interval that contains 80 of 100 step times. It is the error of each run's
    prediction from the other runs."""
    baseline_process_bytes: int = Field(ge=0)
    """Part of a rank's memory that does not depend on the trained model."""
    bytes_per_counted_byte: float = Field(gt=0)
    """Measured bytes of memory per counted byte of a run's tensors."""
    buffer_overhead: float = Field(0.0, ge=0)
    """Additional bytes that communication libraries allocate per byte of communication buffers."""


MAX_NODES = 2**20
"""More than any cluster has; a plan for many more nodes would not end."""


class ClusterSpec(Spec):
    """Nodes, their devices, and their speeds. Unknown speeds are measured or omitted, never guessed.

    Example:
        >>> cluster = phalanx.load_machine("h100").replace(nodes=4, nproc_per_node=8)
        >>> cluster.ranks, cluster.device
        (32, 'cuda')
    """

    preset: LocalPath | None = Field(None, examples=["h100"])
    """A known machine (`phalanx info --list`), or a machine file (written by `phalanx calibrate`), whose values the
    other fields override."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for computation. "auto" uses a GPU if one is available, else the CPU."""
    nodes: int = Field(1, gt=0, le=MAX_NODES)
    """Machines of the run, each with the same number of ranks. Start `phalanx train` on each of them."""
    nproc_per_node: int | None = Field(None, gt=0, examples=[2])
    """Ranks per node. By default one per GPU, or one on a CPU. `--nproc` overrides it."""
    peak_flops: float | None = Field(None, gt=0, examples=[1e12])
    """Peak dense matrix-product speed of one rank's device in FLOP/s at the training precision, for MFU. By default the
    preset's; on a CPU, the speed of a short matrix product at start-up."""
    matmul_flops: float | None = Field(None, gt=0, examples=[794e12])
    """Maximum measured speed of a 16-bit matrix product in FLOP/s (MAMF of stas00/ml-engineering). By default the speed
    that devices of this generation reach."""
    matmul_flops_8bit: float | None = Field(None, gt=0, examples=[1400e12])
    """Maximum measured speed of an 8-bit matrix product in FLOP/s. By default scaled from `matmul_flops` by the ratio
    of the peaks."""
    num_sms: int | None = Field(None, gt=0, examples=[132])
    """Streaming multiprocessors of one device, to which the tiles of a product are assigned. By default products run
    equally fast at any shape."""
    generation: int = Field(0, ge=0, le=len(GENERATIONS) - 1)
    """Generation of the device and of its kernels and libraries: 0 Ampere and older, 1 Hopper, 2 Blackwell, and devices
    of the same age from other vendors."""
    cores: int | None = Field(None, gt=0, examples=[2])
    """CPU cores of a node whose ranks compute on CPUs and share the cores. Speeds are then those of one core."""
    memory_bytes: int | None = Field(None, gt=0, examples=[16_000_000_000])
    """Memory of one device; for CPU ranks, of a node."""
    hbm_bytes_per_second: float | None = Field(None, gt=0, examples=[3350e9])
    """Bandwidth of one device's memory."""
    fast_link_domain: int | None = Field(None, gt=0, examples=[8])
    """Devices joined by fast links (an NVLink domain): possibly fewer than a node has, or those of several nodes. By
    default the preset's, else the ranks of a node."""
    link_bytes_per_second: float | None = Field(None, gt=0, examples=[450e9])
    """Total bandwidth of one device's fast links in one direction: NVLink or xGMI, or PCIe without either."""
    network_bytes_per_second: float | None = Field(None, gt=0, examples=[50e9])
    """One device's share of its node's network cards, in one direction. A plan for several nodes needs it."""
    oversubscription: float = Field(1.0, ge=1)
    """Oversubscription of the fabric above the leaf switches: bandwidth of the network cards divided by that of the
    spine."""
    host_link_bytes_per_second: float | None = Field(None, gt=0, examples=[32e9])
    """Bandwidth between one device and CPU memory in one direction. By default that of a PCIe link of its generation
    with 16 lanes."""
    host_bytes_per_second: float | None = Field(None, gt=0, examples=[51.2e9])
    """One device's share of the bandwidth of its node's CPU memory. By default that of two memory channels of its
    generation."""
    host_memory_bytes: int | None = Field(None, gt=0, examples=[128_000_000_000])
    """One device's share of its node's CPU memory, for offloading. By default 256 GiB."""
    disk_bytes_per_second: float | None = Field(None, gt=0, examples=[5e9])
    """One device's share of the bandwidth of its node's local disk, for reads and writes of `layout.offload = "nvme"`.
    By default that of one NVMe drive on four lanes."""
    watts_per_device: float | None = Field(None, gt=0, examples=[700])
    """Rated power (TDP) of one device in watts, to compute energy."""
    host_watts_per_device: float | None = Field(None, ge=0, examples=[575])
    """One device's share of the rated power of the rest of its node: CPUs, memory, network cards, fans. By default the
    preset's, else in proportion to a DGX H100's, where it is 575 W for a device of 700 W."""
    pue: float = Field(1.56, ge=1)
    """Energy of the data center divided by that of its machines. The default is the average of the Uptime Institute's
    survey of 2024; large clouds report 1.1 to 1.2."""
    price_per_device_hour: float | None = Field(None, gt=0, examples=[2.5])
    """Price of one device per hour, in a currency of your choice."""
    price_per_kwh: float | None = Field(None, gt=0, examples=[0.1])
    """Price of a kWh of electricity, in the same currency."""
    storage_bytes_per_second: float | None = Field(None, gt=0, examples=[20e9])
    """Total bandwidth with which all nodes together write checkpoints."""
    failures_per_device_hour: float | None = Field(None, gt=0, examples=[2e-5])
    """Failures that stop the run, per device and hour. By default the rate of Llama 3's 405B run."""
    restart_seconds: float = Field(600, ge=0)
    """Seconds from a failure to the first step after it."""
    calibration: CalibrationSpec | None = None
    """Calibration from runs on this machine, written by `phalanx calibrate`."""

    @property
    def planned_device(self) -> Literal["cpu", "cuda", "tpu"]:
        """Device that plans assume.

        `device = "auto"` is decided by each rank at its start (`launch.process.select_device`); a plan, often made on
        another machine, looks at no hardware. It takes "auto" as the preset's device. Without a preset it assumes CUDA
        if the bandwidth of a device's memory is given and `cores` is not, else CPUs.
        """
        if self.device != "auto":
            return self.device
        if self.preset == "cpu" or self.cores is not None or self.hbm_bytes_per_second is None:
            return "cpu"
        return "tpu" if self.preset is not None and self.preset.startswith("tpu") else "cuda"

    @property
    def uses_cuda(self) -> bool:
        """True if ranks are planned on GPUs, with CUDA kernels, the CUDA allocator and NCCL."""
        return self.planned_device == "cuda"

    @property
    def uses_cpu(self) -> bool:
        """True if ranks are planned on CPUs, which compute, communicate and offload in one memory."""
        return self.planned_device == "cpu"

    @property
    def ranks_per_core(self) -> float:
        """Ranks per CPU core of a node; below 1 if a rank has several cores."""
        return (self.nproc_per_node or 1) / self.cores if self.cores else 1.0

    @property
    def rank_memory_bytes(self) -> int | None:
        """Memory available to one rank."""
        sharing_ranks = (self.nproc_per_node or 1) if self.cores else 1
        return self.memory_bytes and self.memory_bytes // sharing_ranks

    @property
    def fast_link_domain_size(self) -> int:
        """Number of devices joined by fast links; by default the ranks of a node."""
        return self.fast_link_domain or self.nproc_per_node or 1

    @property
    def planned_nproc_per_node(self) -> int:
        """Ranks of a node, if `nproc_per_node` is not set as many as it has cores or devices."""
        return self.nproc_per_node or self.cores or DEFAULT_DEVICES_PER_NODE

    @property
    def ranks(self) -> int:
        """Total number of ranks over all nodes. A node has one rank if `nproc_per_node` is not set."""
        return (self.nproc_per_node or 1) * self.nodes
