"""Losses and gradients of preferences are those of `trl.DPOTrainer` itself, where trl is installed (1.16.0)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.data.packing import token_ids
from phalanx.train.reference import answer_log_probs
from tests.helpers.small_runs import make_trainer
from tests.integration.test_preferences import preference_run
from tests.model.huggingface.test_checkpoint_traps import fp32_as_fp64, fp64_by_default

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"loss_type": "sigmoid"}),
    ({"length_normalized": True}, {"loss_type": "sigmoid_norm"}),
    ({"loss": "ipo"}, {"loss_type": "ipo"}),
    # trl calls label smoothing "aot" with one pair; with several it sorts them.
    ({"label_smoothing": 0.2}, {"loss_type": "aot", "label_smoothing": 0.2}),
]


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Return the directories of two small models with other weights: the policy and the reference."""
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    folders = [tmp_path / name for name in ("policy", "reference")]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).double().save_pretrained(folder)
    return folders


@pytest.mark.parametrize(("variant", "trl_options"), VARIANTS, ids=str)
def test_loss_and_gradient_are_those_of_trl(
    variant: dict[str, Any], trl_options: dict[str, Any], models: list[Path], documents: Path, tmp_path: Path
) -> None:
    is_one_pair = "label_smoothing" in variant
    # The shortest pairs have 50 tokens, the longest 85.
    changes = {"training.seq_len": 85, "training.tokens_per_step": 85 * (1 if is_one_pair else 12)}

    def trainer_of(folder: Path) -> Any:
        model = {"from_hf": str(folder)}
        return make_trainer(
            preference_run(documents, tmp_path, {"name": folder.name, "model": model, **changes}, **variant)
        )

    trainer, old = map(trainer_of, models)
    batch = trainer.loader.step(0)
    reference = answer_log_probs(old, trainer.corpus.train)
    sums = trainer.forward_backward(trainer.micro_batches(batch, reference))
    reduced = trainer.strategy.reduce(sums.packed)
    ours = trainer.unpack_sums(reduced.sums)

    with fp64_by_default(), fp32_as_fp64():
        policy, reference_model = (
            transformers.AutoModelForCausalLM.from_pretrained(each, attn_implementation="eager").double()
            for each in models
        )
    theirs = trl_trainer(policy, reference_model, tmp_path, beta=trainer.run.preference.beta, **trl_options)
    inputs = padded_inputs([trainer.corpus.train.document(number) for number in batch.pairs.documents.tolist()])
    with fp64_by_default(), fp32_as_fp64():
        loss = theirs.compute_loss(theirs.model, inputs)
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.model.named_parameters()}
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    num_pairs = len(batch.pairs)
    print(variant, num_pairs, float(ours.loss / ours.tokens), loss.item(), float(reduced.norm), norm.item())
    assert num_pairs == 1 if is_one_pair else num_pairs > 8
    assert float(ours.loss / ours.tokens) == pytest.approx(loss.item(), rel=1e-8)
    assert float(reduced.norm) == pytest.approx(norm.item(), rel=1e-8)
    own = trainer.strategy.gradients()
    for name, other in (("embedding", "model.embed_tokens"), ("head", "lm_head"), ("norm", "model.norm")):
        torch.testing.assert_close(own[f"{name}.weight"], gradients[f"{other}.weight"], rtol=1e-8, atol=1e-10)


def trl_trainer(policy: Any, reference: Any, folder: Path, **options: Any) -> Any:
    """Return trl's trainer; its own data is not used."""
    vocabulary = tokenizers.models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(vocabulary), eos_token="<eos>"
    )
    tokenizer.pad_token = "<eos>"
    data = datasets.Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "b"}])
    settings = trl.DPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, **options
    )
    trainer = trl.DPOTrainer(policy, copy.deepcopy(reference), settings, train_dataset=data, processing_class=tokenizer)
    trainer.model.eval()
    # The head that trl puts into the models computes in fp32, its loss in the dtype of log-probabilities.
    for model in (trainer.model, trainer.ref_model):
        model.forward = partial(exact_log_probs, type(model).forward.__get__(model))
    return trainer


def exact_log_probs(
    forward: Callable[..., Any], labels: torch.Tensor, fused_lm_head: bool = True, **inputs: Any
) -> SimpleNamespace:
    """Return what trl's head returns, from fp64 logits."""
    logits = forward(**inputs).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(2, labels[:, 1:, None].clamp(min=0))[..., 0] * (labels[:, 1:] != -100)
    unused = torch.zeros_like(log_probs)
    return SimpleNamespace(log_probs=log_probs, entropy=unused, mean_logits=unused, is_top1=unused.bool())


def padded_inputs(texts: list[Any]) -> dict[str, torch.Tensor]:
    """Return trl's batch of texts: the chosen ones, then the rejected ones, with padding on the right."""
    texts = [*texts[::2], *texts[1::2]]
    ids = [torch.from_numpy(token_ids(text)) for text in texts]
    masks = [torch.from_numpy((text >= 0).astype("int64")) for text in texts]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(each) for each in ids], batch_first=True),
        "completion_mask": pad(masks, batch_first=True),
    }
