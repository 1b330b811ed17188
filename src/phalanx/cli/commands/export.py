"""`phalanx export`: a trained model in a format for other programs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.common.options import Step, TrainedRun, Trust
from phalanx.cli.common.upload import Upload, check_upload, upload_files
from phalanx.spec.base import require

logger = logging.getLogger(__name__)


def export(
    run: TrainedRun,
    directory: Annotated[Path, Argument(help="New directory to write.", metavar="DIR")],
    to: Annotated[
        str, Option(help="Format: hf (loaded by transformers and vLLM; adapters are merged), or peft (adapters only).")
    ] = "hf",
    dtype: Annotated[str, Option(help="Precision of the weights: fp32 or bf16.")] = "fp32",
    step: Step = None,
    upload: Upload = None,
    trust: Trust = None,
) -> None:
    """Write a checkpoint of a run, or a swarm's current model, as a Hugging Face directory with its tokenizer.

    Examples:

        phalanx export runs/demo --to hf demo-hf

        phalanx export runs/demo --to hf demo-hf --dtype bf16

        phalanx export runs/demo --step best best-hf

        phalanx export runs/tuned --to peft tuned-adapter

        phalanx export runs/demo demo-hf --upload s3://bucket/models/demo

        python -c "from transformers import pipeline; print(pipeline('text-generation', 'demo-hf')('def '))"
    """
    require(to in ("hf", "peft"), "--to", to, "is not a known format", fix="use --to hf or --to peft")
    check_upload(upload)
    from phalanx.cost.exact.parameters import count_parameters
    from phalanx.data.tokenize import disk_error
    from phalanx.data.tokenizer import load_tokenizer
    from phalanx.model.huggingface.adapter import export_peft, merge_adapters
    from phalanx.model.huggingface.export import export_hf
    from phalanx.runs.create import FROM_HF_DIR
    from phalanx.train.checkpoint.load_model import find_trained_weights

    trained = find_trained_weights(run, step, trust=bool(trust))
    source = trained.directory / FROM_HF_DIR
    source_directory = source if source.is_dir() else None
    model = trained.run.model
    end = load_tokenizer(trained.tokenizer_file).end
    dropped: list[str] = []
    try:
        if to == "peft":
            fix = "use --to hf: the run has no [adapter]"
            require(trained.run.adapter is not None, "--to", to, "writes adapters only", fix)
            export_peft(model, trained.tensors(), directory, dtype, source_directory)
        else:
            dropped = export_hf(
                model.without_tuning,
                merge_adapters(model, trained.tensors()),
                directory,
                trained.tokenizer_file,
                eos_id=end,
                dtype=dtype,
                source=source_directory,
            )
    except OSError as error:
        raise disk_error("directory", directory, error) from None
    if dropped:
        problem = "the run's tokenizer differs from that of model.from_hf, so of its files these are not exported"
        logger.warning("%s: %s", problem, ", ".join(dropped))
    count = count_parameters(model if to == "peft" else model.without_tuning)
    total = count.trained if to == "peft" else count.total
    at_step = "" if trained.step is None else f" of step {trained.step:,}"
    upload_files(sorted(path for path in directory.iterdir() if path.is_file()), upload)
    others = "adapter_config.json" if to == "peft" else "config.json and the tokenizer"
    print(f"wrote {directory}: {total:,} parameters{at_step} in {dtype}, {others}")
    if to == "peft" and trained.run.adapter is not None and trained.run.adapter.base_dtype is not None:
        print("these adapters were trained on 4-bit weights: load the model with load_in_4bit (nf4) before them")
