"""`phalanx export`: a trained model in a format for other programs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.common.options import Step, TrainedRun, Trust
from phalanx.spec.base import require

logger = logging.getLogger(__name__)


def export(
    run: TrainedRun,
    directory: Annotated[Path, Argument(help="New directory to write.", metavar="DIR")],
    to: Annotated[str, Option(help="Format: hf (loaded by transformers and vLLM).")] = "hf",
    dtype: Annotated[str, Option(help="Precision of the weights: fp32 or bf16.")] = "fp32",
    step: Step = None,
    trust: Trust = None,
) -> None:
    """Write a checkpoint of a run, or a swarm's current model, as a Hugging Face directory with its tokenizer.

    Examples:

        phalanx export runs/demo --to hf demo-hf

        phalanx export runs/demo --to hf demo-hf --dtype bf16

        phalanx export runs/demo --step best best-hf

        python -c "from transformers import pipeline; print(pipeline('text-generation', 'demo-hf')('def '))"
    """
    require(to == "hf", "--to", to, "is not a known format", fix="use --to hf")
    from phalanx.data.tokenize import disk_error
    from phalanx.data.tokenizer import load_tokenizer
    from phalanx.model.huggingface.export import export_hf
    from phalanx.parallel.module_tensors import named_buffers
    from phalanx.runs.create import FROM_HF_DIR
    from phalanx.train.checkpoint.load_model import load_trained_model

    trained = load_trained_model(run, step, trust=bool(trust))
    parameters = dict(trained.module.named_parameters())
    biases = dict(named_buffers(trained.module))
    source = trained.directory / FROM_HF_DIR
    end = load_tokenizer(trained.tokenizer_file).end
    try:
        dropped = export_hf(
            trained.run.model,
            parameters | biases,
            directory,
            trained.tokenizer_file,
            eos_id=end,
            dtype=dtype,
            source=source if source.is_dir() else None,
        )
    except OSError as error:
        raise disk_error("directory", directory, error) from None
    if dropped:
        problem = "the run's tokenizer differs from that of model.from_hf, so of its files these are not exported"
        logger.warning("%s: %s", problem, ", ".join(dropped))
    total = sum(parameter.numel() for parameter in parameters.values())
    at_step = "" if trained.step is None else f" of step {trained.step:,}"
    print(f"wrote {directory}: {total:,} parameters{at_step} in {dtype}, config.json and the tokenizer")
