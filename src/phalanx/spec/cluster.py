"""The machines of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from phalanx.spec.base import Spec


class CalibrationSpec(Spec):
    """What runs on a machine showed, in place of what published runs did."""

    runs: int = Field(gt=0)
    """How many."""
    precision: Literal["bf16", "fp32", "fp64"]
    """In which they computed: of others it says nothing."""
    time_constants: dict[str, float]
    """Constants of step times (`phalanx.cost.estimate.constants`) that differ from those of published runs."""
    identified_constants: list[str]
    """Of these, the ones that the runs decide; the others stand where published runs, or guesses, put them."""
    log_half_width: float = Field(gt=0)
    """Of the interval that holds 80 of 100 step times, as a logarithm: as far as each run was off when the others
    predicted it."""
    baseline_process_bytes: int = Field(ge=0)
    """Of a rank's memory, what is there whatever it trains."""
    bytes_per_counted_byte: float = Field(gt=0)
    """Bytes of memory for each that is counted of a run's tensors."""
    buffer_overhead: float = Field(0.0, ge=0)
    """Of each byte of buffers of communication, how many more count as a tensor's: what libraries hold beside them."""


class ClusterSpec(Spec):
    """Nodes, the devices in them, and what they can do. Unknown speeds are measured or left out, never guessed.

    Example:
        >>> cluster = phalanx.load_machine("h100").replace(nodes=4, nproc_per_node=8)
        >>> cluster.ranks, cluster.device
        (32, 'cuda')
    """

    preset: str | None = Field(None, examples=["h100"])
    """A known machine (`phalanx info --list`), or the file of one (`phalanx calibrate` writes it), whose values the
    other fields override."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What computes: auto takes the GPU that is there, else the CPU."""
    nodes: int = Field(1, gt=0)
    """Machines of the run, each with as many ranks; phalanx train starts on each of them."""
    nproc_per_node: int | None = Field(None, gt=0, examples=[2])
    """Ranks per node; by default one per GPU, and on a CPU one. `--nproc` overrides it."""
    peak_flops: float | None = Field(None, gt=0, examples=[1e12])
    """Peak dense matrix-product speed of one rank's device in FLOP/s at the training precision, for MFU. By default the
    preset's, or on a CPU what a short matrix product reaches at start-up."""
    matmul_flops: float | None = Field(None, gt=0, examples=[794e12])
    """The most that a matrix product in 16 bits was measured to reach (stas00/ml-engineering's MAMF). By default what
    devices of its generation reach."""
    matmul_flops_8bit: float | None = Field(None, gt=0, examples=[1400e12])
    """The same in 8 bits. By default as much faster as its peak."""
    num_sms: int | None = Field(None, gt=0, examples=[132])
    """Of one device: what the tiles of a product are dealt to. By default products run as fast at any shape."""
    generation: int = Field(0, ge=0, le=2)
    """Of the device, and of the kernels and libraries made for it: 0 Ampere and older, 1 Hopper, 2 Blackwell, and what
    is of their age from others."""
    cores: int | None = Field(None, gt=0, examples=[2])
    """Of a node where CPUs compute, whose ranks share them: speeds are then those of one core."""
    memory_bytes: int | None = Field(None, gt=0, examples=[16_000_000_000])
    """Memory of one device; where CPUs compute, of a node."""
    hbm_bytes_per_second: float | None = Field(None, gt=0, examples=[3350e9])
    """Bandwidth of one device's memory."""
    fast_link_domain: int | None = Field(None, gt=0, examples=[8])
    """Devices joined by the fast links (an NVLink domain), which may be fewer than a node has, or those of several
    nodes. By default the preset's, else the ranks of a node."""
    link_bytes_per_second: float | None = Field(None, gt=0, examples=[450e9])
    """What one device's fast links carry together in one direction: NVLink or xGMI, or PCIe where there is neither."""
    network_bytes_per_second: float | None = Field(None, gt=0, examples=[50e9])
    """One device's share of its node's network cards, in one direction. A plan for several nodes needs it."""
    oversubscription: float = Field(1.0, ge=1)
    """Of the fabric above the leaf switches: bandwidth of the network cards divided by what the spine carries."""
    host_link_bytes_per_second: float | None = Field(None, gt=0, examples=[32e9])
    """Of what joins one device with CPU memory, in one direction. By default PCIe of its generation, 16 lanes."""
    host_bytes_per_second: float | None = Field(None, gt=0, examples=[51.2e9])
    """One device's share of the bandwidth of its node's CPU memory. By default two channels of its generation's."""
    host_memory_bytes: int | None = Field(None, gt=0, examples=[128_000_000_000])
    """One device's share of its node's CPU memory, for what is offloaded. By default 256 GiB."""
    disk_bytes_per_second: float | None = Field(None, gt=0, examples=[5e9])
    """One device's share of its node's local disk, read and written, for `layout.offload = "nvme"`. By default one NVMe
    drive on four lanes."""
    watts_per_device: float | None = Field(None, gt=0, examples=[700])
    """Power of one device, for energy."""
    price_per_device_hour: float | None = Field(None, gt=0, examples=[2.5])
    """Price of one device for an hour, in a currency of your choice."""
    price_per_kwh: float | None = Field(None, gt=0, examples=[0.1])
    """Price of electricity, in that currency."""
    storage_bytes_per_second: float | None = Field(None, gt=0, examples=[20e9])
    """At which all nodes together write checkpoints."""
    failures_per_device_hour: float | None = Field(None, gt=0, examples=[2e-5])
    """How often a device, or what belongs to it, stops the run. By default as often as in Llama 3's 405B run."""
    restart_seconds: float = Field(600, ge=0)
    """From a failure to the first step after it."""
    calibration: CalibrationSpec | None = None
    """What runs on this machine showed: `phalanx calibrate` writes it."""

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
        """True if ranks are planned on GPUs: with CUDA's kernels, its allocator and NCCL."""
        return self.planned_device == "cuda"

    @property
    def uses_cpu(self) -> bool:
        """True if ranks are planned on CPUs, which compute, communicate and offload in one memory."""
        return self.planned_device == "cpu"

    @property
    def ranks_per_core(self) -> float:
        """Ranks that share one core, of a node where CPUs compute: below 1 where a rank has several."""
        return (self.nproc_per_node or 1) / self.cores if self.cores else 1.0

    @property
    def rank_memory_bytes(self) -> int | None:
        """Memory that one rank may fill."""
        sharing_ranks = (self.nproc_per_node or 1) if self.cores else 1
        return self.memory_bytes and self.memory_bytes // sharing_ranks

    @property
    def fast_link_domain_size(self) -> int:
        """Devices that fast links join: those of a node, where nothing else is said."""
        return self.fast_link_domain or self.nproc_per_node or 1

    @property
    def ranks(self) -> int:
        """Ranks of all nodes, of which each has one where `nproc_per_node` is not set."""
        return (self.nproc_per_node or 1) * self.nodes
