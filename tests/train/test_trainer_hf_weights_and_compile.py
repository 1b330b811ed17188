"""Where training starts from (Hugging Face weights), and the same training compiled."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from phalanx.data.loader import prefetch
from phalanx.data.packing import IGNORE_INDEX
from tests.helpers.small_runs import DENSE, make_trainer, small_run, train_until


def test_trainer_first_loss_from_hf_weights_matches_transformers(text: Path, tmp_path: Path) -> None:
    """The first loss of the real trainer is transformers' own loss on that batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**shape, **heads, initializer_range=0.3, tie_word_embeddings=False)
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "hf")
    changes = {"model": {"from_hf": str(tmp_path / "hf")}, "data.mask_documents": False, "training.precision": "fp32"}
    under_way = make_trainer(small_run(text, tmp_path, changes))
    batch = next(prefetch(under_way.loader, 0, 1))
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    assert batch.document_starts is None
    assert not (targets == IGNORE_INDEX).any()
    whole = torch.cat((tokens, targets[:, -1:]), dim=1)
    with torch.no_grad():
        expected = float(theirs(input_ids=whole, labels=whole).loss)
    ((loss, _),) = train_until(under_way, 1)
    assert loss == pytest.approx(expected, rel=1e-6)
    drawn = {**changes, "model": {**DENSE, "qk_norm": "none"}}
    assert train_until(make_trainer(small_run(text, tmp_path, drawn)), 1)[0][0] != pytest.approx(expected, rel=0.01)


@pytest.mark.timeout(240)  # 25 s where nothing is in the compiler's cache yet, 4 s after
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_compiled_training_equals_eager(text: Path, tmp_path: Path) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    changes = {"training.precision": "fp32", "data.mask_documents": False, "model": {**DENSE, "num_layers": 1}}
    eager = train_until(make_trainer(small_run(text, tmp_path, changes)), 4)
    begun = time.monotonic()
    compiled = make_trainer(small_run(text, tmp_path, {**changes, "training.compile": True}))
    assert all(block._compiled_call_impl is not None for block in compiled.module.blocks)
    assert train_until(compiled, 4) == [pytest.approx(step, rel=1e-5) for step in eager]
    print(f"compiled and trained in {time.monotonic() - begun:.1f} s")
