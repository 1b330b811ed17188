"""Training that starts from Hugging Face weights, and compiled training."""

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
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**shape, **heads, initializer_range=0.3, tie_word_embeddings=False)
    hf_model = LlamaForCausalLM(config)
    hf_model.save_pretrained(tmp_path / "hf")
    changes = {"model": {"from_hf": str(tmp_path / "hf")}, "data.mask_documents": False, "training.precision": "fp32"}
    trainer = make_trainer(small_run(text, tmp_path, changes))
    batch = next(prefetch(trainer.loader, 0, 1))
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    assert batch.document_starts is None
    assert not (targets == IGNORE_INDEX).any()
    sequences = torch.cat((tokens, targets[:, -1:]), dim=1)
    with torch.no_grad():
        expected = float(hf_model(input_ids=sequences, labels=sequences).loss)
    ((loss, _),) = train_until(trainer, 1)
    assert loss == pytest.approx(expected, rel=1e-6)
    random_weights = {**changes, "model": {**DENSE, "qk_norm": "none"}}
    assert train_until(make_trainer(small_run(text, tmp_path, random_weights)), 1)[0][0] != pytest.approx(
        expected, rel=0.01
    )


@pytest.mark.timeout(240)  # 25 s where nothing is in the compiler's cache yet, 4 s after
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_compiled_training_equals_eager(text: Path, tmp_path: Path) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    changes = {"training.precision": "fp32", "data.mask_documents": False, "model": {**DENSE, "num_layers": 1}}
    eager = train_until(make_trainer(small_run(text, tmp_path, changes)), 4)
    start = time.monotonic()
    compiled = make_trainer(small_run(text, tmp_path, {**changes, "training.compile": True}))
    assert all(block._compiled_call_impl is not None for block in compiled.module.blocks)
    assert train_until(compiled, 4) == [pytest.approx(step, rel=1e-5) for step in eager]
    print(f"compiled and trained in {time.monotonic() - start:.1f} s")
