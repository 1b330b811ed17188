"""Rules that a layout must obey to run a model on a number of ranks.

`spec.layout` has the rules for its options alone, `spec.parallel_dims` those for the number of ranks, and `spec.batch`
those for the sequences of a step.
"""

from __future__ import annotations

from math import lcm

from phalanx.program.pipeline_split import layers_per_rank, layers_per_stage
from phalanx.schedule.registry import layout_schedule
from phalanx.spec.attention_backend import has_softcap, has_window, smallest_window
from phalanx.spec.base import divisors, require
from phalanx.spec.batch import BatchPlan
from phalanx.spec.errors import UserError
from phalanx.spec.files.teacher import FIELD, resolved_teacher
from phalanx.spec.formatting import plural
from phalanx.spec.layers import distinct_layers
from phalanx.spec.layout import FSDP_STRATEGIES, Layout, check_supported
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks
from phalanx.spec.parts.model import model_parameters
from phalanx.spec.parts.operations import NF4_BLOCK, AttentionCore, Part
from phalanx.spec.pipeline_schedules import SCHEDULES, V_SCHEDULES, quote_names
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import parameter_shardings
from phalanx.spec.tuning import AdapterSpec

FP8_MULTIPLE = 16
"""Divisor of the rows and columns that products in float8 (`torch._scaled_mm`) accept."""


def require_resolved_layout(run: RunSpec) -> None:
    """Raise UserError if the run's layout or its recomputation is "auto" and not yet chosen."""
    require_planned_layout(run)
    problem = "is chosen by the planner, which this command does not run"
    fix = "set the value that `phalanx train RUN.toml --print-config` prints"
    require(not run.layout.auto_checkpointing, "layout.activation_checkpointing", "auto", problem, fix)


def require_planned_layout(run: RunSpec) -> None:
    """Raise UserError if the run's layout is "auto" and not yet chosen."""
    problem = "is chosen by the planner, which this command does not run"
    fix = "use phalanx train, or save a layout with phalanx plan RUN.toml --out FILE"
    require(not run.auto_layout, "layout", "auto", problem, fix)


def assume_no_recomputation(run: RunSpec) -> RunSpec:
    """Return the run without recomputation if it is "auto", for results that do not depend on it."""
    return run.model_copy(update={"layout": run.layout.model_copy(update={"auto_checkpointing": False})})


def check_layout(resolved: ResolvedRun) -> None:
    """Raise UserError if the ranks cannot run the layout with this model and batch size."""
    run = resolved.run
    require_resolved_layout(run)
    check_supported(run.layout)
    batch = resolved.batch
    check_divisibility(resolved)
    if run.layout.pp > 1:
        _check_pipeline(run, batch)
    _check_recomputed_blocks(run)
    _check_teacher(resolved)


def _check_teacher(resolved: ResolvedRun) -> None:
    """Raise UserError if the ranks cannot run the teacher of a run with distillation in its layout."""
    teacher = resolved_teacher(resolved)
    if teacher is None or resolved.run.distillation is None:
        return
    try:
        check_layout(teacher)
    except UserError as error:
        problem = f"cannot run in this layout: {error.field} = {error.value!r} {error.problem}"
        raise UserError(FIELD, resolved.run.distillation.teacher, problem, error.fix) from None


def layout_error(resolved: ResolvedRun) -> UserError | None:
    """Return why the ranks cannot run the layout; None if they can."""
    try:
        check_layout(resolved)
    except UserError as error:
        return error
    return None


def _check_recomputed_blocks(run: RunSpec) -> None:
    """Raise UserError if more blocks recompute activations than a rank has."""
    counts = run.layout.recomputed_blocks
    if counts is None:
        return
    limits = [len(layers) for layers in layers_per_rank(run)]
    for count, limit in zip(counts, limits, strict=True) if isinstance(counts, tuple) else [(counts, max(limits))]:
        if count > limit:
            rank = "a pipeline rank" if run.layout.pp > 1 else "the model"
            problem = f"exceeds the {plural(limit, 'block')} of {rank}"
            raise UserError("layout.recomputed_blocks", counts, problem, f"use at most {limit}")


def _check_pipeline(run: RunSpec, batch: BatchPlan) -> None:
    """Raise UserError if a pipeline cannot run this model, or its schedule this number of micro-batches."""
    layout = run.layout
    micro_batches = batch.gradient_accumulation_steps
    crossing = {
        "num_shared_kv_layers": "keys and values",
        "per_layer_input_size": "inputs of layers",
    }
    for field, values in crossing.items():
        if value := getattr(run.model, field):
            problem = f"is not supported in a pipeline (layout.pp = {layout.pp}): {values} would cross its stages"
            raise UserError(f"model.{field}", value, problem, "set layout.pp = 1")
    layers_per_stage(run)
    try:
        schedule = layout_schedule(layout, micro_batches)
    except UserError as error:
        if layout.schedule_file is not None:
            raise
        problem = f"cannot run a step of {micro_batches} micro-batches: the number {error.problem}"
        fix = "change layout.micro_batch_size or training.tokens_per_step"
        raise UserError("layout.schedule", layout.schedule, problem, fix=fix) from None
    supports_uneven = layout.schedule_file is None and SCHEDULES[layout.schedule].supports_uneven_micro_batches
    if not supports_uneven and not batch.has_equal_micro_batches:
        name = layout.schedule_file or layout.schedule
        problem = f'results in different numbers of micro-batches per rank, which schedule "{name}" does not support'
        fix = "use a multiple of layout.micro_batch_size x data-parallel ranks x training.seq_len"
        raise UserError("training.tokens_per_step", run.training.tokens_per_step, problem, fix)
    first, last = schedule.end_ranks
    if run.model.reuses_embedding and first != last and layout.data_parallel in FSDP_STRATEGIES:
        problem = f'requires embedding and head on one rank with layout.data_parallel = "{layout.data_parallel}"'
        fix = (
            f"use layout.schedule = {quote_names(V_SCHEDULES)}, which have both on one rank, or "
            'layout.data_parallel = "zero1"'
        )
        mtp = run.model.mtp
        field, value = ("model.mtp.layers", mtp.layers) if mtp else ("model.tie_embeddings", True)
        raise UserError(field, value, problem, fix)


def check_divisibility(resolved: ResolvedRun) -> None:
    """Raise UserError for a model that cannot be divided among the ranks.

    Checks heads, widths, vocabulary, experts and tokens.
    """
    run = resolved.run
    spec = run.model
    layout = run.layout
    if layout.tp > 1:
        _check_tensor(spec, layout, run.training.seq_len)
    if run.training.precision == "fp8":
        _check_fp8(spec, layout)
    if layout.tp > 1 and spec.tuning.adapter is not None:
        _check_base_dtype(spec, layout, spec.tuning.adapter)
    if spec.moe is not None and spec.moe.capacity_factor is not None:
        _check_capacity(layout, spec.moe.capacity_factor)
    if layout.ep > 1:
        _check_experts(resolved)
    if layout.tp > 1 and layout.gradient_compression == "powersgd":
        problem = f"cannot be combined with layout.tp = {layout.tp}: its approximation would make replicas differ"
        raise UserError("layout.gradient_compression", "powersgd", problem, "remove layout.gradient_compression")
    if layout.cp > 1:
        _check_context(spec, layout, run.training.seq_len)


def _parts(spec: ModelSpec, layout: Layout) -> list[Part]:
    """Return the parts of a block of each kind."""
    return [branch.part for block in dict.fromkeys(blocks(spec, layout)) for branch in block]


def _check_tensor(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    """Check all that tensor-parallel ranks share: units of widths, tokens, and rows of the vocabulary."""
    tp = layout.tp
    if layout.tp_attention == "gathered":
        _check_gathered_heads(spec, layout)
    cuts = dict.fromkeys(cut for part in _parts(spec, layout) for cut in part.cuts)
    for cut in cuts:
        if cut.is_shared_by(tp):
            continue
        problem = f"does not divide {cut.field} ({cut.units})"
        fix = f"use a tensor-parallel degree that divides {cut.field}"
        if cut.copied_below:
            problem = f"neither divides {cut.field} ({cut.units}) nor is a multiple of it"
            fix = f"use a divisor or a multiple of {cut.field}"
        alternative = ', or layout.tp_attention = "gathered"' if cut.field == "model.num_heads" else ""
        raise UserError("layout.tp", tp, problem, fix + alternative)
    if layout.sequence_parallel and seq_len % tp:
        fix = "use a tensor-parallel degree that divides training.seq_len, or layout.sequence_parallel = false"
        raise UserError("layout.tp", tp, f"does not divide training.seq_len ({seq_len})", fix)
    rows = -(-spec.vocab_size // tp)
    if (tp - 1) * rows >= spec.vocab_size:
        problem = f"leaves a rank without rows of the embedding (model.vocab_size = {spec.vocab_size})"
        fix = "use a smaller tensor-parallel degree, or a larger vocabulary"
        raise UserError("layout.tp", tp, problem, fix)


def _check_gathered_heads(spec: ModelSpec, layout: Layout) -> None:
    problem = f"cannot be combined with context parallelism (layout.cp = {layout.cp})" if layout.cp > 1 else ""
    for layer in distinct_layers(spec):
        if layer.mixer and layer.attends:
            problem = f"is not supported by mixer = {layer.mixer.kind!r}"
        if layer.num_shared_kv_layers:
            problem = "is not supported with model.num_shared_kv_layers"
        if layer.value_norm:
            problem = "is not supported with model.value_norm"
        if layer.attends and layer.value_width != layer.head_dim:
            problem = "is not supported with model.value_head_dim"
        if layer.attention_gate not in ("none", "channel"):
            problem = f"is not supported with model.attention_gate = {layer.attention_gate!r}"
        if layer.attends and not layer.mixer and layer.num_kv_heads != layer.num_heads:
            heads = f"model.num_heads ({layer.num_heads})"
            problem = f"requires model.num_kv_heads ({layer.num_kv_heads}) to equal {heads}"
    if problem:
        fix = 'use layout.tp_attention = "split" with a degree that divides the heads'
        raise UserError("layout.tp_attention", layout.tp_attention, problem, fix)


def _check_fp8(spec: ModelSpec, layout: Layout) -> None:
    """Check the widths of products in float8, each of which some ranks share."""
    products = (product for part in _parts(spec, layout) for product in part.linears if not product.is_precise)
    for output in (product.writes for product in products):
        cut = output.cut
        ranks = layout.tp // cut.replication(layout.tp) if cut else 1
        if output.width % (FP8_MULTIPLE * ranks):
            field = "model.hidden_size"
            if cut:
                field = cut.field if cut.unit == 1 else f"{cut.field} x head_dim"
            per_rank = f" on each of {ranks} ranks" if ranks > 1 else ""
            problem = f"requires widths that are multiples of {FP8_MULTIPLE}{per_rank}, and {field} is {output.width}"
            smaller_degree = "use a smaller layout.tp, " if ranks > 1 else ""
            fix = f'change {field}, {smaller_degree}or set training.precision = "bf16"'
            raise UserError("training.precision", "fp8", problem, fix)


def _check_base_dtype(spec: ModelSpec, layout: Layout, adapter: AdapterSpec) -> None:
    """Check that ranks which share the columns of quantized matrices have whole blocks of them."""
    shardings = parameter_shardings(spec, layout)
    for name, parameter in model_parameters(spec).items():
        columns = parameter.shape[-1]
        is_cut = parameter.is_quantized and shardings[name].dim == len(parameter.shape) - 1
        if is_cut and columns % (NF4_BLOCK * layout.tp):
            problem = f"has blocks of {NF4_BLOCK} numbers, but {name} has {columns} columns for {layout.tp} ranks"
            fix = "use a smaller layout.tp, or remove adapter.base_dtype"
            raise UserError("adapter.base_dtype", adapter.base_dtype, problem, fix)


def _check_capacity(layout: Layout, capacity_factor: float) -> None:
    if layout.cp > 1 or (layout.tp > 1 and layout.sequence_parallel):
        sharing_option = "layout.cp" if layout.cp > 1 else "layout.sequence_parallel"
        requirement = ", which layout.ep requires with layout.tp," if layout.cp == 1 < layout.ep else ""
        problem = f"requires full sequences on each rank, but {sharing_option}{requirement} splits sequences"
        alternative = ", layout.ep or layout.tp" if requirement else f" or {sharing_option}"
        fix = f"remove model.moe.capacity_factor{alternative}"
        raise UserError("model.moe.capacity_factor", capacity_factor, problem, fix)


def _check_experts(resolved: ResolvedRun) -> None:
    run = resolved.run
    layout = run.layout
    ep = layout.ep
    moe = run.model.moe
    if moe is None:
        raise UserError("layout.ep", ep, "cannot be combined with a model without experts", "set layout.ep = 1")
    if moe.num_experts % ep:
        problem = f"does not divide model.moe.num_experts ({moe.num_experts})"
        raise UserError("layout.ep", ep, problem, f"use one of {', '.join(map(str, divisors(moe.num_experts)))}")
    if layout.tp > 1 and not layout.sequence_parallel:
        problem = f"requires sequence parallelism with layout.tp = {layout.tp}, so that ranks have different tokens"
        raise UserError("layout.ep", ep, problem, "set layout.sequence_parallel = true")
    # Ranks that exchange tokens for experts must have equal numbers of micro-batches.
    if (layout.cp * layout.tp) % ep and not resolved.batch.has_equal_micro_batches:
        problem = f"results in different numbers of micro-batches per rank; layout.ep = {ep} requires equal numbers"
        fix = "use a multiple of micro-batch size x data-parallel ranks x training.seq_len"
        raise UserError("training.tokens_per_step", run.training.tokens_per_step, problem, fix)


def _check_context(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    cp = layout.cp
    num_chunks = cp * (2 if layout.cp_method == "ring" else 1)
    required_multiple = lcm(num_chunks, cp * (layout.tp if layout.sequence_parallel else 1))
    if seq_len % required_multiple:
        problem = f"requires training.seq_len ({seq_len}) to be a multiple of {required_multiple}"
        nearest_seq_len = max(1, round(seq_len / required_multiple)) * required_multiple
        raise UserError("layout.cp", cp, problem, f"use training.seq_len = {nearest_seq_len}, or a smaller degree")
    if layout.cp_method == "ring" and has_window(spec, seq_len):
        window = smallest_window(spec)
        problem = f"does not support the windows of model.sliding_window ({window})"
        fix = f'use "ulysses", or training.seq_len = {window} or less'
        raise UserError("layout.cp_method", "ring", problem, fix)
    if layout.cp_method == "ring" and has_softcap(spec):
        problem = "does not support the caps of model.attention_softcap"
        raise UserError("layout.cp_method", "ring", problem, 'use "ulysses"')
    for core in (core for part in _parts(spec, layout) for core in part.cores):
        if layout.cp_method == "ring" and not isinstance(core, AttentionCore):
            problem = "exchanges keys and values, and some layers have another mixer than attention"
            raise UserError("layout.cp_method", "ring", problem, 'use "ulysses"')
        for cut in (value.cut for value in core.reads if value.cut and layout.cp_method == "ulysses"):
            units = cut.units_on_rank(layout.tp)
            if not cut.is_shared_by(cp, units):
                problem = f"does not divide the {units} units of a tensor-parallel rank ({cut.field} = {cut.units})"
                alternative = 'layout.cp_method = "ring", or ' if isinstance(core, AttentionCore) else ""
                raise UserError("layout.cp", cp, problem, f"use {alternative}a smaller degree")
