"""Loading of a trained model into ranks that share it, for scores and generation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.parallel.apply import apply_layout
from phalanx.parallel.comm.objects import rank_and_world_size
from phalanx.parallel.inference import SharedModel
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.program.pipeline_split import layers_per_stage
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.load_model import TrainedWeights
from phalanx.train.checkpoint.state import load_checkpoint
from phalanx.train.training_data import await_checkpoint


def inference_run(found: TrainedWeights, layout: Layout, num_ranks: int) -> RunSpec:
    """Return the run of a trained model in the layout of ranks that do not train it.

    Ranks of context parallelism have all weights. Without gradients, each computes whole texts, and other ones than the
    others. Raises UserError for a layout that does not fit, a swarm, or a network of the user's own."""
    if found.checkpoint is None or found.run.model.implementation is not None:
        problem = "is a swarm, or has a network of its own, which run in one process"
        raise UserError("RUN_DIR", str(found.directory), problem, "remove --nproc")
    training = found.run.training
    run = found.run.replace(
        layout=layout,
        # There are no steps: their batch is any that the ranks can share.
        training=training.replace(tokens_per_step=training.seq_len * num_ranks),
        phase=[],
        distillation=None,
    )
    check_layout(ResolvedRun(run, num_ranks))
    defaults = {field: Layout.model_fields[field].default for field in ("cp", "cp_method")}
    return run.replace(layout=layout.model_copy(update=defaults))


def load_in_ranks(found: TrainedWeights, layout: Layout, device: torch.device) -> tuple[SharedModel, Mesh]:
    """Return the model of a checkpoint under a layout, in fp32. A collective: every rank must call it.

    Raises UserError as `inference_run` does."""
    run = inference_run(found, layout, rank_and_world_size()[1])
    mesh = build_mesh(run.layout, device_type=device.type)
    layers = layers_per_stage(run) if layout.pp > 1 else ()
    strategy = apply_layout(run.model, run.layout, mesh, device, await_checkpoint, "fp32", layers=layers)
    assert found.checkpoint is not None
    load_checkpoint(found.checkpoint, strategy, [])
    strategy.module.eval()
    return SharedModel(strategy, agreeing=dist.group.WORLD), mesh
