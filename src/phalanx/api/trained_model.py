"""Load a trained model from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn

from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.train.checkpoint.load_model import load_trained_model


def load_model(
    run_dir: str | Path, step: int | Literal["best"] | None = None, *, trust: bool = False
) -> tuple[nn.Module, Tokenizer]:
    """Load the model of a run's checkpoint, and its tokenizer.

    The checkpoint may have been saved under any layout.

    Args:
        run_dir: The directory of the run, of one of its checkpoints (RUN_DIR/checkpoints/step-N), or of a swarm.
        step: The step of the checkpoint. "best": the one with the lowest held-out loss (validation loss). By default
            the newest.
        trust: Import the network that the directory names as `model.implementation`. That runs code: read it before you
            trust someone else's directory.

    Returns:
        The full model in fp32 on the CPU, in evaluation mode, and the tokenizer. Phalanx's transformer
        takes token ids [B, T] and returns logits [B, T, V] and an auxiliary loss; a run with `model.implementation` has
        a network of that class.

    Raises:
        UserError: `run_dir` is not a run directory, has no intact checkpoint of this step, or names a network without
            `trust`.

    Example:
        >>> model, tokenizer = phalanx.load_model("runs/first")
        >>> model.training, tokenizer.decode(tokenizer.encode_batch(["import"])[0])
        (False, 'import')
    """
    trained = load_trained_model(Path(run_dir), step, trust=trust)
    return trained.module, load_tokenizer(trained.tokenizer_file)
