"""Load a trained model from Python."""

from __future__ import annotations

from pathlib import Path

from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.model.transformer import Transformer
from phalanx.train.checkpoint.load_model import load_trained_model


def load_model(run_dir: str | Path) -> tuple[Transformer, Tokenizer]:
    """Load the model of the latest checkpoint of a run, and its tokenizer.

    The checkpoint may have been saved under any layout.

    Args:
        run_dir: The directory of the run, or of a swarm.

    Returns:
        The full model in fp32 on the CPU, in evaluation mode, and the tokenizer. The model takes token ids [B, T] and
        returns logits [B, T, V] and an auxiliary loss.

    Raises:
        UserError: `run_dir` is not a run directory, or has no intact checkpoint.

    Example:
        >>> model, tokenizer = phalanx.load_model("runs/first")
        >>> model.training, tokenizer.decode(tokenizer.encode_batch(["import"])[0])
        (False, 'import')
    """
    _, model, tokenizer_file, _ = load_trained_model(Path(run_dir))
    return model, load_tokenizer(tokenizer_file)
