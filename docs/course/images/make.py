"""Draw the pictures of the course: `python docs/course/images/make.py [NAME...]`, with the `draw` extra.

Every number comes from Phalanx's own formulas, but for the measurements of chapters 3 and 5, which stand here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from phalanx.cost.exact.activation_memory import activation_bytes
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.cost.exact.model_state import model_state_bytes, sharded_state_bytes
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.swarm import node_share, round_bytes, round_time
from phalanx.cost.formulas.reliability import LLAMA3, goodput, mtbf_seconds, young_interval_seconds
from phalanx.report.drawing.schedule import LEGEND, executed_spans
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.simulate import ActionTimes, simulate
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import Codec, Method

FOLDER = Path(__file__).parent
BLUE, TEAL, GREEN, ORANGE, RED, GRAY = "#4c78c8", "#2f9e8f", "#3f9b4f", "#d98a2b", "#c5504b", "#8a8f98"
KIND_COLORS = {"F": BLUE, "B": TEAL, "I": GREEN, "W": ORANGE}
PICTURES: dict[str, Callable[[], Figure]] = {}

mpl.rcParams |= {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "phalanx",
}


def picture(name: str) -> Callable[[Callable[[], Figure]], Callable[[], Figure]]:
    """Register a function that draws the file `name`."""

    def register(draw: Callable[[], Figure]) -> Callable[[], Figure]:
        PICTURES[name] = draw
        return draw

    return register


SMALL = {
    "model": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "ffn_hidden_size": 192,
        "max_seq_len": 128,
    },
    "data": {"train": ["text.txt"], "tokenizer": "bytes", "mask_documents": False},
    "training": {"seq_len": 128, "tokens_per_step": 1024, "precision": "fp32"},
}
"""The model that most chapters train."""


def label(axis: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], color: str, **style: Any):
    """Write `text` next to a point of the data."""
    axis.annotate(text, point, offset, textcoords="offset points", color=color, **style)


@picture("01-memory.svg")
def memory() -> Figure:
    """Draw the memory of the small model over the micro-batch, with and without recomputation."""
    spec = RunSpec.model_validate(SMALL)
    state = model_state_bytes(count_parameters(spec.model), "adamw", "fp32").total
    sizes = range(1, 17)
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for checkpointing, color in (("none", RED), ("full", TEAL)):
        layout = Layout(activation_checkpointing=checkpointing)
        shapes = (
            ForwardShape(batch=size, sequence=128, precision="fp32", layout=layout, autocast=False, masked=False)
            for size in sizes
        )
        total = [state + activation_bytes(spec.model, shape).peak for shape in shapes]
        axis.plot(sizes, [value / 1e6 for value in total], "o-", markersize=3, color=color)
        label(axis, f"recompute {checkpointing}", (12, total[11] / 1e6), (-8, 6), color, ha="right")
    axis.fill_between(sizes, state / 1e6, color=BLUE, alpha=0.25)
    label(axis, "model state: 16 bytes per parameter", (15.8, 0), (0, 2), BLUE, ha="right")
    axis.set(xlabel="sequences in a micro-batch, $b$", ylabel="MB on one rank", xlim=(1, 16), ylim=0)
    return figure


@picture("09-schedules.png")
def schedules() -> Figure:
    """Draw five schedules of four stages and eight micro-batches on one time axis."""
    names = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]
    figure, axes = plt.subplots(len(names), 1, figsize=(8, 6.2), sharex=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        schedule = build_schedule(name, 4, 8)
        part = schedule.ranks / schedule.stages  # of a rank's layers in one stage
        timeline = simulate(schedule, ActionTimes(forward=part, input_grad=part, weight_grad=part))
        for rank, span in executed_spans(timeline):
            style = {"color": KIND_COLORS[span.action.kind], "edgecolor": "white", "linewidth": 0.4}
            alpha = 0.6 if span.action.stage > 3 else 1
            axis.broken_barh([(span.start, span.seconds)], (rank - 0.42, 0.84), alpha=alpha, **style)
        makespan = float(timeline.makespan)
        axis.axvline(makespan, color=RED, linewidth=1)
        axis.set_title(f"{name}: makespan {makespan:g}, bubble {float(timeline.bubble):.1%}", loc="left", fontsize=9)
        axis.set(yticks=range(4), ylim=(3.6, -0.6), ylabel="rank", facecolor="#eef0f3")
    handles = [mpl.patches.Patch(color=KIND_COLORS[kind], label=LEGEND[kind]) for kind in KIND_COLORS]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    axes[-1].set_xlabel("time, one forward pass of a micro-batch through a stage = 1")
    return figure


@picture("06-zero.svg")
def zero() -> Figure:
    """Draw the bytes of model state per parameter over the number of ranks."""
    ranks = [1, 2, 4, 8, 16, 32, 64]
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    parameters = 64 * 10**6
    for strategy, color in (("ddp", RED), ("zero1", ORANGE), ("zero2", BLUE), ("zero3", TEAL)):
        owned = [parameters // (1 if strategy == "ddp" else n) for n in ranks]
        states = [sharded_state_bytes(strategy, "bf16", parameters, count, 2 * count) for count in owned]
        per_parameter = [state.total / parameters for state in states]
        axis.plot(ranks, per_parameter, "o-", color=color, markersize=4)
        label(axis, f"{strategy}  {per_parameter[-1]:.4g}", (64, per_parameter[-1]), (6, -3), color)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="data-parallel ranks, $N$", ylabel="bytes per parameter and rank", ylim=0, yticks=range(0, 17, 2))
    axis.set_xticks(ranks, [str(n) for n in ranks])
    return figure


LLAMA_RUN = """
name = "llama"
model.preset = "llama3-70b"
training = { seq_len = 8192, tokens_per_step = 4194304 }
"""
COMMANDS = {"11-step.svg": "plan explain run.toml --machine h100 --nodes 16 --picture"}
"""Pictures that a command of Phalanx draws, for `LLAMA_RUN`."""


def run_command(name: str) -> None:
    """Write a picture of `COMMANDS`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.toml").write_text(LLAMA_RUN)
        command = [sys.executable, "-m", "phalanx", *COMMANDS[name].split(), str(FOLDER / name)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


@picture("12-surviving.svg")
def surviving() -> Figure:
    """Draw the goodput over the checkpoint interval, and the learning part of a node's time over its link's speed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    mtbf = mtbf_seconds(LLAMA3.per_device_hour, 16_384)
    minutes = [0.5 * 1.1**i for i in range(50)]
    for write, color in ((2.435, TEAL), (24.35, RED)):
        parts = [goodput(60 * interval, write, mtbf, 600) for interval in minutes]
        left.plot(minutes, [100 * part for part in parts], color=color, label=f"a checkpoint takes {write:.3g} s")
        young = young_interval_seconds(write, mtbf)
        left.plot(young / 60, 100 * goodput(young, write, mtbf, 600), "o", color=color)
    left.set(xscale="log", xlabel="minutes between checkpoints (dot: Young)", ylabel="goodput, %", ylim=(70, 95))
    left.minorticks_off()
    left.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    left.legend(loc="lower right")
    model = load_model_spec("spes-7b")
    speeds = [10 * 1.2**i for i in range(39)]
    kinds: list[tuple[Method, Codec, int, str]] = [
        ("ddp", "fp32", 0, GRAY),
        ("diloco", "fp32", 0, RED),
        ("spes", "fp32", 8, BLUE),
        ("spes+", "int8", 8, TEAL),
    ]
    for method, codec, owned, color in kinds:
        traffic = round_bytes(node_share(model, method, owned), method, codec)
        steps = 1 if method == "ddp" else 100
        times = [round_time(traffic, speed * 125e3, speed * 125e3, steps, 20.0) for speed in speeds]
        right.plot(speeds, [100 * time.utilization for time in times], color=color, label=f"{method}, {codec}")
    right.set(
        xscale="log", xlabel="link of a node, Mbit/s", ylabel="part of its time that a node learns, %", ylim=(0, 100)
    )
    right.legend(loc="upper left")
    return figure


def box(axis: Axes, center: tuple[float, float], size: tuple[float, float], text: str, color: str) -> None:
    """Draw a box with a text in it."""
    (x, y), (width, height) = center, size
    corner = (x - width / 2, y - height / 2)
    axis.add_patch(mpl.patches.Rectangle(corner, width, height, facecolor=color, alpha=0.25, edgecolor=color))
    axis.text(x, y, text, ha="center", va="center", color="#222222")


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], color: str = GRAY, **style: Any) -> None:
    """Draw an arrow."""
    axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color, "linewidth": 1.3, **style})


def canvas(width: float, height: float, unit: float = 0.7) -> tuple[Figure, Axes]:
    """Return an empty figure whose coordinates reach from 0 to `width` and `height`."""
    figure, axis = plt.subplots(figsize=(width * unit, height * unit), layout="constrained")
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


@picture("07-tensor-parallel.svg")
def tensor_parallel() -> Figure:
    """Draw Megatron's pair of products on two ranks, and where sequence parallelism splits tokens."""
    figure, axis = canvas(12, 5)
    for row, rank in ((3.3, 0), (1.2, 1)):
        axis.text(0.1, row, f"rank {rank}", va="center")
        box(axis, (1.9, row), (1.3, 1.0), f"norm\ntokens {rank}", GREEN)
        box(axis, (5.0, row), (1.5, 1.3), f"$X A_{rank + 1}$\ncolumns", BLUE)
        box(axis, (7.0, row), (1.2, 1.3), "$\\phi$", BLUE)
        box(axis, (9.0, row), (1.5, 1.3), f"$\\cdot\\, B_{rank + 1}$\nrows", BLUE)
        box(axis, (11.3, row), (1.2, 1.0), f"tokens {rank}", GREEN)
        for start, end in ((2.6, 4.2), (5.8, 6.35), (7.65, 8.2), (9.8, 10.65)):
            arrow(axis, (start, row), (end, row))
    for x, text in ((3.4, "all-gather"), (10.2, "reduce-scatter")):
        axis.plot([x, x], [0.4, 4.1], color=ORANGE, linewidth=2)
        axis.text(x, 4.35, text, color=ORANGE, ha="center")
    axis.text(6.9, 4.35, "all tokens, a part of the width", color=BLUE, ha="center")
    axis.text(6.9, 0.15, "no communication between the two products", color=GRAY, ha="center")
    return figure


@picture("08-context-parallel.svg")
def context_parallel() -> Figure:
    """Draw the bytes that a rank sends per layer over the number of context-parallel ranks."""
    ranks = [2, 4, 8, 16, 32]
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    tokens, width = 131_072, 4096
    for name, kv_width, line in (("32 key/value heads", 4096, "--"), ("8 key/value heads", 1024, "-")):
        blocks = [2 * tokens / c * kv_width for c in ranks]
        ring = [(2 * (c - 1) * 2 + c * 4) * block for c, block in zip(ranks, blocks, strict=True)]
        heads = [2 * (2 * width + 2 * kv_width) * tokens / c * 2 * (c - 1) / c for c in ranks]
        for method, sent, color in (("ring", ring, BLUE), ("Ulysses", heads, ORANGE)):
            axis.plot(ranks, [size / 1e9 for size in sent], line, marker="o", markersize=4, color=color)
            label(axis, f"{method}, {name}", (ranks[-1], sent[-1] / 1e9), (6, -3), color)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(c) for c in ranks])
    axis.set(
        xlabel="ranks that share a sequence of 131,072 tokens, $c$", ylabel="GB sent per rank and layer", yscale="log"
    )
    axis.set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    axis.minorticks_off()
    return figure


@picture("02-data-parallel.svg")
def data_parallel() -> Figure:
    """Draw the exchanges of a parameter server and of an all-reduce."""
    figure, axis = canvas(12, 4.6)
    axis.text(2.9, 4.3, "parameter server", ha="center", weight="bold")
    box(axis, (2.9, 3.4), (3.4, 0.9), "server: weights, moments", ORANGE)
    for index in range(3):
        x = 0.9 + 2.0 * index
        box(axis, (x, 0.8), (1.6, 1.1), f"worker {index}\nbatch / 3", BLUE)
        arrow(axis, (2.5 + 0.3 * index, 2.9), (x - 0.15, 1.45), TEAL)
        arrow(axis, (x + 0.15, 1.45), (2.8 + 0.3 * index, 2.9), RED)
    axis.text(0.0, 2.3, "weights", color=TEAL)
    axis.text(4.75, 2.3, "gradients", color=RED)
    axis.text(9.3, 4.3, "all-reduce", ha="center", weight="bold")
    spots = [(9.3, 3.3), (11.0, 0.9), (7.6, 0.9)]
    for index, spot in enumerate(spots):
        box(axis, spot, (1.9, 1.1), f"rank {index}\nbatch / 3", BLUE)
    for start, end in (((10.0, 2.7), (10.8, 1.5)), ((9.95, 0.9), (8.65, 0.9)), ((7.8, 1.5), (8.6, 2.7))):
        arrow(axis, start, end, RED)
    axis.text(9.3, 1.75, "sums of\ngradients", color=RED, ha="center", va="center")
    return figure


@picture("04-overlap.svg")
def overlap() -> Figure:
    """Draw when buckets of gradients are ready, and when their all-reduces end, for three bucket sizes."""
    layers, layer_seconds, latency, layer_transfer = 12, 1.0, 0.7, 0.6
    figure, axes = plt.subplots(3, 1, figsize=(8, 3.9), sharex=True, layout="constrained")
    for axis, size in zip(axes, (12, 3, 1), strict=True):
        end = 0.0
        for bucket in range(layers // size):
            for layer in range(bucket * size, (bucket + 1) * size):
                axis.broken_barh([(layer * layer_seconds, layer_seconds)], (1, 0.8), color=TEAL, edgecolor="white")
            start = max(end, (bucket + 1) * size * layer_seconds)
            end = start + latency + size * layer_transfer
            axis.broken_barh([(start, latency)], (0, 0.8), color=RED, edgecolor="white")
            axis.broken_barh([(start + latency, size * layer_transfer)], (0, 0.8), color=ORANGE, edgecolor="white")
        axis.axvline(layers * layer_seconds, color=GRAY, linestyle=":")
        text = f"{size} layers in a bucket: {end - layers * layer_seconds:.1f} exposed"
        axis.set_title(text, loc="left", fontsize=9)
        axis.set_yticks([0.4, 1.4], ["all-reduce", "backward"])
    handles = [
        mpl.patches.Patch(color=color, label=text)
        for color, text in ((TEAL, "backward pass of a layer"), (RED, "latency"), (ORANGE, "transfer"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    axes[-1].set_xlabel("time, backward pass of one layer = 1")
    return figure


@picture("05-batch-size.svg")
def batch_size() -> Figure:
    """Draw the steps and tokens that a run needs, relative to the fewest, over the batch size."""
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    ratios = [0.05 * 1.1**i for i in range(64)]
    axis.plot(ratios, [1 + 1 / ratio for ratio in ratios], color=BLUE)
    axis.plot(ratios, [1 + ratio for ratio in ratios], color=ORANGE)
    label(axis, "steps", (0.13, 1 + 1 / 0.13), (6, 2), BLUE)
    label(axis, "tokens", (7.5, 8.5), (-6, 2), ORANGE, ha="right")
    axis.plot(1, 2, "o", color=RED)
    label(axis, "twice the fewest of both", (1, 2), (0, 40), RED, ha="center")
    axis.set(xscale="log", yscale="log", xlabel=r"batch, $B\,/\,B_\mathrm{noise}$", ylabel="relative to the fewest")
    axis.set(ylim=(1, 20), xlim=(0.05, 20))
    axis.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axis.minorticks_off()
    return figure


ALL_REDUCE_MICROSECONDS = {
    16384: 2198.16,
    32768: 1086.76,
    65536: 2170.0,
    131072: 1676.93,
    262144: 1834.07,
    524288: 2957.95,
    1018112: 3541.18,
    1048576: 2888.85,
    2097152: 3801.3,
    4194304: 4726.26,
    8388608: 8450.88,
    16777216: 15088.5,
}
"""In-place times of chapter 3, measured with gloo on two ranks of a machine with two cores."""


@picture("03-all-reduce.svg")
def all_reduce() -> Figure:
    """Draw measured times of all-reduces over their size, and the fitted line."""
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    latency, bandwidth = 921.4, 1.04e3  # microseconds, bytes per microsecond
    sizes = [2**i for i in range(13, 26)]
    axis.plot(sizes, [latency + size / bandwidth for size in sizes], color=BLUE)
    axis.plot(sizes, [latency for _ in sizes], ":", color=GRAY)
    axis.plot(sizes, [size / bandwidth for size in sizes], ":", color=GRAY)
    axis.plot(ALL_REDUCE_MICROSECONDS.keys(), ALL_REDUCE_MICROSECONDS.values(), "o", color=ORANGE, label="measured")
    axis.axvline(latency * bandwidth, color=RED, linewidth=0.8)
    label(
        axis, "latency and bandwidth\ntake equally long: 958 kB", (latency * bandwidth, 3e4), (-6, 0), RED, ha="right"
    )
    axis.set(xscale="log", yscale="log", ylim=(100, 1e5), xlim=(8192, 2**25))
    axis.set(xlabel="bytes of an all-reduce, $S$", ylabel="microseconds")
    axis.set_xticks([2**14, 2**17, 2**20, 2**23], ["16 KiB", "128 KiB", "1 MiB", "8 MiB"])
    axis.minorticks_off()
    axis.legend(loc="lower right")
    return figure


EXPERT_TOKENS = [
    [129, 120, 42, 40, 282, 1515, 293, 1675],
    [129, 1040, 472, 28, 155, 473, 23, 1776],
    [26, 126, 5, 135, 1622, 596, 285, 1301],
    [1591, 499, 114, 2, 1312, 8, 543, 27],
]
"""By layer and expert, as chapter 10's run counted them in its third and fourth step."""


@picture("10-experts.svg")
def experts() -> Figure:
    """Draw the share of the choices of each expert, by layer."""
    figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
    image = axis.imshow([[count / 512 for count in row] for row in EXPERT_TOKENS], cmap="Blues", vmin=0, aspect="auto")
    for layer, row in enumerate(EXPERT_TOKENS):
        for expert, count in enumerate(row):
            color = "white" if count > 1000 else "#222222"
            axis.text(expert, layer, f"{count / 512:.2f}", ha="center", va="center", color=color)
    axis.axvline(3.5, color=RED, linewidth=2)
    axis.set(xlabel="expert (line: rank 0 | rank 1)", ylabel="layer", yticks=range(4), xticks=range(8))
    figure.colorbar(image, label="times an even share")
    return figure


def main(names: Sequence[str]) -> None:
    """Write the pictures of these names, or all."""
    for name in names or [*PICTURES, *COMMANDS]:
        if name in COMMANDS:
            run_command(name)
        else:
            figure = PICTURES[name]()
            figure.savefig(FOLDER / name, dpi=110, metadata={"Date": None} if name.endswith(".svg") else None)
            plt.close(figure)
        print(f"{name}: {(FOLDER / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
