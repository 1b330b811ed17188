"""What a run takes in memory: state of a whole model, and all that each rank holds under its layout.

Exact, tested against the strategies to the byte: parameters, gradients and optimizer state of the fullest rank, split
by rows with the remainder (not counted: buffers, and AdamW's step, 4 bytes a tensor). Estimates: activations, as
`cost.activations` says of them, in a pipeline of all micro-batches in flight, and communication buffers
(`cost.buffers`). Each part is the most of it at any time, and these times differ: the total is the most at one time.
Not in it: a gradient that is added to another, the allocator's gaps, libraries, the process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.cost.activations import ActivationBytes, InFlight, Stage, activation_bytes, in_flight, stages_of
from phalanx.cost.buffers import Sending, exchange_bytes, link_bytes, sendings, server_buffers
from phalanx.cost.moments import Kept, moments, moments_in_flight, update_bytes
from phalanx.cost.network import Strategy
from phalanx.cost.parameters import ParameterCount, parameters
from phalanx.cost.precision import COMPUTED, KEPT, Precision
from phalanx.cost.shapes import Shape, Shapes, elements, muon_trains, owned_elements, parameter_shapes
from phalanx.cost.shares import Held, rank_shapes
from phalanx.cost.stages import check_layout, stage_layers
from phalanx.schedule.named import schedule_of
from phalanx.spec.layout import SHARDED, Layout, degrees, spread
from phalanx.spec.run import Cut, OptimizerSpec, RunSpec, cut_batch

Optimizer = Literal["sgd", "sgd-momentum", "adamw", "muon"]

STATES: dict[Optimizer, int] = {"sgd": 0, "sgd-momentum": 1, "adamw": 2, "muon": 1}
"""Numbers that an optimizer keeps per parameter: none, a momentum, Adam's two moments, Muon's momentum."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state by part: of one parameter, or times a count, of a whole model."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes that training holds from step to step."""
        return self.parameters + self.gradients + self.optimizer

    def __mul__(self, count: int) -> StateBytes:
        return StateBytes(self.parameters * count, self.gradients * count, self.optimizer * count)

    def __add__(self, more: StateBytes) -> StateBytes:
        optimizer = self.optimizer + more.optimizer
        return StateBytes(self.parameters + more.parameters, self.gradients + more.gradients, optimizer)


PUBLISHED_MIXED_PRECISION_ADAM = StateBytes(parameters=2, gradients=2, optimizer=12)
"""The 16 bytes of the literature (ZeRO, arXiv 1910.02054, section 3.1): half-precision parameters and
gradients, and an fp32 master copy among the optimizer's state. Phalanx's bf16 has 16 too, cut otherwise."""


def state_bytes(optimizer: Optimizer, precision: Precision) -> StateBytes:
    """Bytes per parameter that Phalanx keeps; multiply by a count of parameters.

    Parameters, gradients and state are fp32 for bf16 and fp32 alike: the bf16 copies that the products read
    are made when needed and dropped. fp64 doubles everything. "muon" is a parameter that Muon itself trains.
    """
    number = KEPT[precision]
    return StateBytes(number, number, STATES[optimizer] * number)


def model_state_bytes(count: ParameterCount, optimizer: Optimizer, precision: Precision) -> StateBytes:
    """Bytes of a model's whole state. With muon, AdamW trains what is not a matrix inside a block."""
    if optimizer != "muon":
        return state_bytes(optimizer, precision) * count.total
    rest = count.total - count.block_matrices
    return state_bytes("muon", precision) * count.block_matrices + state_bytes("adamw", precision) * rest


def checkpoint_bytes(run: RunSpec) -> int:
    """Bytes of one checkpoint: parameters and optimizer state."""
    state = model_state_bytes(parameters(run.model), optimizer_of(run.optimizer), run.training.precision)
    return state.parameters + state.optimizer


def room_for_checkpoints_bytes(run: RunSpec, there: int) -> int:
    """Bytes that the checkpoints of a run still need beside those that are there: the oldest goes when a new one has
    come."""
    return max(1, run.checkpoint.keep + 1 - there) * checkpoint_bytes(run)


def optimizer_of(spec: OptimizerSpec) -> Optimizer:
    """What a run's optimizer is called here."""
    if spec.name == "sgd":
        return "sgd-momentum" if spec.momentum else "sgd"
    return spec.name


def strategy_bytes(strategy: Strategy, precision: Precision, whole: int, owned: int, states: int) -> StateBytes:
    """State that one rank keeps of a model of `whole` parameters, of which it owns `owned`, and keeps `states` numbers
    of optimizer state.

    Bytes per parameter with Adam on N ranks (`whole` 1, `owned` 1/N, `states` 2/N; of ddp 2):

        |              | bf16      | fp32      |
        |--------------|-----------|-----------|
        | ddp          | 16        | 16        |
        | zero1        | 4 + 12/N  | 8 + 8/N   |
        | zero2        | 2 + 14/N  | 4 + 12/N  |
        | zero3, hsdp  | 16/N      | 16/N      |

    In bf16, zero1 and zero2 keep model and gradients in bf16, and fp32 rows, which they train, among the optimizer's
    state: the published figures (ZeRO, arXiv 1910.02054, section 3.1 and figure 1). In fp32 and fp64 those rows are
    the model's own.
    """
    computed, kept = COMPUTED[precision], KEPT[precision]
    trained_apart = kept * owned if precision == "bf16" else 0
    match strategy:
        case "zero1":
            return StateBytes(computed * whole, computed * whole, trained_apart + kept * states)
        case "zero2":
            return StateBytes(computed * whole, computed * owned, trained_apart + kept * states)
        case "zero3" | "hsdp":
            return StateBytes(kept * owned, kept * owned, kept * states)
        case "ddp" | "parameter_server":
            return StateBytes(kept * whole, kept * whole, kept * states)


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank holds, by what for; each the most at any time."""

    parameters: int
    gradients: int
    optimizer: int
    """State, and with bf16 under zero1 and zero2 the fp32 rows that are trained."""
    activations: int = 0
    communication: int = 0
    """Buffers, and what was gathered and is given back."""
    offloaded: int = 0
    """Resting in CPU memory or files; not in `total`."""
    in_files: int = 0
    """Of what is offloaded."""
    never_together: int = 0
    """What the most of all parts add up to beyond the most of all of them at one time; below 0 where that is at the
    update, whose own needs are in no part."""

    @property
    def state(self) -> int:
        """Bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def working(self) -> int:
        """Bytes that come and go within a step."""
        return self.activations + self.communication

    @property
    def total(self) -> int:
        """Bytes on the device, the most at one time."""
        return self.state + self.working - self.never_together

    @property
    def host(self) -> int:
        """Bytes in CPU memory, of what is offloaded."""
        return self.offloaded - self.in_files


def rank_memory(run: RunSpec, world_size: int) -> dict[str, RankMemory]:
    """What the fullest rank of each role holds: of "rank", with a parameter server of "server" and "worker", in a
    pipeline of "pp0", "pp1", ...: its first place, its second.

    Raises UserError if the layout cannot run on so many ranks.
    """
    check_layout(run, world_size)
    places = _places(run, world_size)
    if run.layout.data == "parameter_server":
        return {"server": _server(run, world_size), "worker": places[0]}
    if run.layout.pp == 1:
        return {"rank": places[0]}
    return {f"pp{place}": held for place, held in enumerate(places)}


def rank_states(run: RunSpec, world_size: int) -> list[StateBytes]:
    """What the fullest rank that computes, at each place of the pipeline (one, without a pipeline), holds from step to
    step, before anything is offloaded. Exact."""
    return [_state(run, rank) for rank in rank_shapes(run, world_size)]


def _state(run: RunSpec, rank: Held) -> StateBytes:
    precision, strategy = run.training.precision, runs_as(run.layout, rank.shards)
    total = StateBytes(0, 0, 0)
    for shapes, shards in ((rank.dense, rank.shards), (rank.apart, rank.apart_shards)):
        # With nobody to share the rest with, ZeRO-3 splits nothing; a parameter server keeps its workers' states.
        whole, _ = _counts(shapes, run, 1)
        owned, states = _counts(shapes, run, 1 if strategy == "ddp" else shards)
        total += strategy_bytes(strategy, precision, whole, owned, 0 if strategy == "parameter_server" else states)
    number = (KEPT if strategy == "ddp" else COMPUTED)[precision]  # ddp computes by autocast
    copied = 0 if rank.copied is None else number * elements(rank.copied)
    return StateBytes(total.parameters + copied, total.gradients, total.optimizer)


def _places(run: RunSpec, world_size: int) -> list[RankMemory]:
    """Ranks that compute, one of each place of the pipeline."""
    layout, sizes = run.layout, degrees(run.layout, world_size)
    data, cut = sizes.as_data(sharded=layout.data in SHARDED), cut_batch(run, world_size)
    strategy = runs_as(layout, data.dp_shard)
    passes = _in_flight(run, cut, strategy) if layout.pp > 1 else []
    exchange = exchange_bytes(run, cut.micro_batch)
    alike: dict[object, tuple[tuple[StateBytes, int, int], list[Sending]]] = {}
    found = []
    for place, rank in enumerate(rank_shapes(run, world_size)):
        kinds = rank.kinds
        if kinds not in alike:
            alike[kinds] = _rests(run, rank, strategy), sendings(rank, run, strategy, data, cut.accumulation)
        (state, offloaded, in_files), sent = alike[kinds]
        kept = _kept(run, rank, strategy, state, cut.accumulation, alone=data.dp == 1)
        if layout.pp == 1:
            activations = _activations(run, cut, strategy)
            beside, most, at = exchange, activations.peak, moments(kept, activations, exchange, sent)
        else:  # what is exchanged inside blocks is among what is in flight
            beside, most = link_bytes(run, cut.micro_batch, place), max(passes[place].before, passes[place].trained)
            at = moments_in_flight(kept, passes[place], beside, sent)
        parts = RankMemory(
            state.parameters, state.gradients, state.optimizer, most,
            beside + max((each.bytes for each in sent), default=0), offloaded, in_files,
        )  # fmt: skip
        found.append(replace(parts, never_together=parts.total - max(at)))
    return found


def _kept(run: RunSpec, rank: Held, strategy: Strategy, state: StateBytes, accumulation: int, alone: bool) -> Kept:
    """What of a rank's state is there when. DDP's buckets are there all the time, and a parameter server's worker adds
    up in place; others drop gradients when they were used. What DDP drops for parts that a step leaves unused, the
    micro-batches before the last make anew outside its buckets. In a pipeline ZeRO-3 adds up whole gradients."""
    layout, gradients = run.layout, state.gradients
    buckets = strategy == "ddp" and not alone and layout.pp == 1
    sets = max(buckets, accumulation > 1) + (buckets and layout.unused_parameters and accumulation > 1)
    summed = gradients
    if strategy in ("zero3", "hsdp") and layout.pp > 1:
        summed = KEPT[run.training.precision] * sum(map(elements, [*rank.dense.values(), *rank.apart.values()]))
    if rank.copied is not None:  # its gradient, until that is sent to who trains it
        summed += COMPUTED[run.training.precision] * elements(rank.copied)
    before = gradients if strategy == "parameter_server" else sets * gradients
    return Kept(state.parameters + state.optimizer, gradients, before, summed, update_bytes(run, rank, strategy))


def in_files_bytes(run: RunSpec, world_size: int) -> int:
    """What the fullest rank puts in files (`layout.offload = "nvme"`)."""
    layout, sizes = run.layout, degrees(run.layout, world_size)
    strategy = runs_as(layout, sizes.as_data(sharded=layout.data in SHARDED).dp_shard)
    return max(_rests(run, rank, strategy)[2] for rank in rank_shapes(run, world_size))


def _rests(run: RunSpec, rank: Held, strategy: Strategy) -> tuple[StateBytes, int, int]:
    """What a rank has on its device from step to step, what rests elsewhere, and what of that in files."""
    layout, state = run.layout, _state(run, rank)
    if layout.offload == "none":
        return state, 0, 0
    owned = _counts(rank.dense, run, rank.shards)[0] + _counts(rank.apart, run, rank.apart_shards)[0]
    copied = 0 if run.training.precision == "bf16" else KEPT[run.training.precision] * owned
    kept, offloaded = _offload(strategy, state, copied)
    # FSDP2 keeps parameters and gradients in CPU memory; only the state is ours to put in files.
    in_files = state.optimizer if strategy in ("zero3", "hsdp") else offloaded
    return kept, offloaded, in_files if layout.offload == "nvme" else 0


def _activations(run: RunSpec, cut: Cut, strategy: Strategy, stage: Stage | None = None) -> ActivationBytes:
    """Of a micro-batch, in a pipeline on one of its stages."""
    autocast = strategy in ("ddp", "parameter_server")
    sizes = run.model, cut.micro_batch, run.training.sequence, run.training.precision, run.layout, autocast
    return activation_bytes(*sizes, run.data.mask_documents, stage)


def _in_flight(run: RunSpec, cut: Cut, strategy: Strategy) -> list[InFlight]:
    """What a rank at each place of the pipeline has of activations."""
    schedule, kept = schedule_of(run.layout, cut.accumulation), dict[object, ActivationBytes]()
    of_stages = []
    for stage in stages_of(stage_layers(run), schedule):
        alike = tuple(map(run.model.is_moe, stage.layers)), stage.first, stage.last
        if alike not in kept:
            kept[alike] = _activations(run, cut, strategy, stage)
        of_stages.append(kept[alike])
    inside = exchange_bytes(run, cut.micro_batch)
    return [in_flight(schedule, place, of_stages, inside) for place in range(run.layout.pp)]


def _server(run: RunSpec, world_size: int) -> RankMemory:
    """The server that holds most. A server is in CPU memory, whatever computes."""
    layout, shapes = run.layout, parameter_shapes(run.model)
    workers = cut_batch(run, world_size).dp
    owner = spread({name: elements(shape) for name, shape in shapes.items()}, layout.servers)
    servers = []
    for server in range(layout.servers):
        owned, states = _counts({name: shape for name, shape in shapes.items() if owner[name] == server}, run, 1)
        state = strategy_bytes("parameter_server", run.training.precision, owned, owned, states)
        buffers = server_buffers(state.parameters, workers, layout.staleness)
        servers.append(RankMemory(state.parameters, state.gradients, state.optimizer, communication=buffers))
    return max(servers, key=lambda server: server.total)


def runs_as(layout: Layout, shards: int) -> Strategy:
    """The strategy that a layout comes to: FSDP with nobody to share with is a replica, or ZeRO-2 if it offloads; in a
    pipeline ZeRO-2 keeps whole gradients."""
    data = layout.data
    if data in ("zero3", "hsdp") and shards == 1:
        data = "ddp" if layout.offload == "none" else "zero2"
    return "zero1" if layout.pp > 1 and data == "zero2" else data


def _counts(shapes: Shapes, run: RunSpec, ranks: int) -> tuple[int, int]:
    """Parameters of the first of `ranks` that share all rows, and numbers of optimizer state that it keeps for them."""
    optimizer = optimizer_of(run.optimizer)
    owned = {name: owned_elements(shape, ranks) for name, shape in shapes.items()}
    return sum(owned.values()), sum(count * _states(name, shapes[name], optimizer) for name, count in owned.items())


def _states(name: str, shape: Shape, optimizer: Optimizer) -> int:
    """Numbers of optimizer state per number of a parameter: Muon leaves what is no matrix in a block to AdamW."""
    return STATES["adamw" if optimizer == "muon" and not muon_trains(name, shape) else optimizer]


def _offload(strategy: Strategy, state: StateBytes, copied: int) -> tuple[StateBytes, int]:
    """What offload leaves on the device, and the bytes that rest elsewhere: of ZeRO-1 all that is trained (`copied`
    where it would be the model's own rows) and its state, of ZeRO-2 also the gradients, of ZeRO-3 everything."""
    if strategy in ("zero3", "hsdp"):
        return StateBytes(0, 0, 0), state.total
    kept = StateBytes(state.parameters, state.gradients if strategy == "zero1" else 0, 0)
    return kept, state.total - kept.total + copied
