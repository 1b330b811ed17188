"""Training on preferences: losses and gradients are those of the published formulas, and all layouts agree."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.cli.views.plan_notes import list_assumptions
from phalanx.data.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from phalanx.data.loader import prefetch
from phalanx.data.packing import token_ids
from phalanx.data.prepare import prepare
from phalanx.data.record_formats import PreferenceFormat
from phalanx.runs.create import claim_run_directory, run_directory
from phalanx.spec import chunks
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.create_run import check_and_prepare, create_run
from phalanx.train.step_rows import rows_of_step
from phalanx.verify.dry_run import trace_ranks
from phalanx.verify.plan_comparison import compare_with_plan
from tests.helpers.small_runs import DENSE, MOE, make_trainer, small_run, train_until

NUM_PAIRS = 60


def preference(number: int) -> dict[str, str]:
    return {
        "prompt": f"What is {number} + 1?",
        "chosen": f" It is {number + 1}." + " Yes." * (number % 3),
        "rejected": f" Perhaps {number}," + " or not" * (number % 4),
    }


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def preference_run(text: Path, out: Path, changes: dict[str, Any] | None = None, **preference_table: Any) -> RunSpec:
    """Return a run of three steps on pairs of answers, of which some sequences have more than others."""
    (out / "pairs.jsonl").write_text("\n".join(json.dumps(preference(number)) for number in range(NUM_PAIRS)))
    data = {
        "train": str(out / "pairs.jsonl"),
        "format": "preference",
        "tokenizer": "bytes",
        "cache": str(out / "cache"),
        "held_out_fraction": 0.2,
    }
    table = {"beta": 0.3, **preference_table}
    return small_run(
        text,
        out,
        {
            "data": data,
            "preference": table,
            "training.steps": 3,
            "optimizer.learning_rate": 1e-3,
            "training.seq_len": 128,
            "training.tokens_per_step": 1024,
            **(changes or {}),
        },
    )


VARIANTS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2},
    {"length_normalized": True, "beta": 2.0},
    {"loss": "ipo"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_loss_and_gradient_are_those_of_the_published_formula(
    variant: dict[str, Any], documents: Path, tmp_path: Path
) -> None:
    check_step_against_formula(preference_run(documents, tmp_path, **variant))


@pytest.mark.parametrize("model", [{}, {"tie_embeddings": True}, {"logits_softcap": 1.5}], ids=str)
def test_gradient_is_equal_if_logits_do_not_fit(
    model: dict[str, Any], documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LOGITS_CHUNK_BYTES", 100 * 257 * 8)
    run = preference_run(documents, tmp_path, {"model": {**DENSE, **model}})
    assert make_trainer(run).strategy.head_token_losses(torch.zeros(1, 128, dtype=torch.long), -100) is not None
    check_step_against_formula(run)


def check_step_against_formula(run: RunSpec) -> None:
    """Compare the third step with the formula on the logits of each text alone, without packing and padding."""
    trainer = make_trainer(run)
    reference = copy.deepcopy(trainer.module)
    train_until(trainer, 2)
    policy = copy.deepcopy(trainer.module)
    batch = trainer.loader.step(2)
    assert batch.pairs is not None
    assert trainer.reference is not None
    assert trainer.corpus.train is not None
    texts = [trainer.corpus.train.document(number) for number in batch.pairs.documents.tolist()]
    losses = []
    for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
        losses.append(
            formula(run, *(log_probs(model, text) for text in (chosen, rejected) for model in (policy, reference)))
        )
    expected = torch.stack(losses).mean()
    expected.backward()
    sums = trainer.forward_backward(trainer.micro_batches(batch, trainer.reference.train))
    reduced = trainer.unpack_sums(trainer.strategy.reduce(sums.packed).sums)
    assert len(losses) == int(reduced.preferences[0]) > 8
    assert float(reduced.loss / reduced.tokens) == pytest.approx(expected.item(), rel=1e-12)
    gradients = trainer.strategy.gradients()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def log_probs(model: torch.nn.Module, text: np.ndarray) -> torch.Tensor:
    """Return the log-probability of each token of the answer at the end of a text."""
    ids = torch.from_numpy(token_ids(text))
    of_all = torch.log_softmax(model(ids[None, :-1])[0][0], dim=-1)
    of_targets = of_all.gather(1, ids[1:, None])[:, 0]
    return of_targets[torch.from_numpy(text[1:] >= 0)]


def formula(
    run: RunSpec, chosen: torch.Tensor, old_chosen: torch.Tensor, rejected: torch.Tensor, old_rejected: torch.Tensor
) -> torch.Tensor:
    """Return the loss of a pair as its paper, and trl 1.16.0 (`DPOTrainer._compute_loss`), write it."""
    spec = run.preference
    assert spec is not None
    ratios = (chosen - old_chosen).sum(), (rejected - old_rejected).sum()
    if spec.loss == "ipo":
        return (ratios[0] / len(chosen) - ratios[1] / len(rejected) - 1 / (2 * spec.beta)) ** 2
    if spec.length_normalized:
        ratios = ratios[0] / len(chosen), ratios[1] / len(rejected)
    delta = spec.beta * (ratios[0] - ratios[1])
    return -(1 - spec.label_smoothing) * F.logsigmoid(delta) - spec.label_smoothing * F.logsigmoid(-delta)


FOUR_LAYERS = {**DENSE, "num_layers": 4}
LAYOUTS: list[dict[str, Any]] = [
    {"layout.data_parallel": "ddp"},
    {"layout.data_parallel": "zero1"},
    {"layout.data_parallel": "zero3"},
    {"layout.tp": 2},
    {"layout.pp": 2, "layout.schedule": "1f1b"},
    {"layout.pp": 2, "layout.schedule": "zb-v", "model": FOUR_LAYERS},
    {"layout.cp": 2},
    {"layout.cp": 2, "layout.cp_method": "ulysses"},
    {"model": MOE, "layout.ep": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pairs_train_equally_in_layouts(layout: dict[str, Any], documents: Path, tmp_path: Path) -> None:
    changes = {name: value for name, value in layout.items() if name == "model"}
    on_one_rank = rank_pool(1).run(train_and_evaluate_pairs, preference_run(documents, tmp_path, changes))[0]
    layout = {**layout, "name": "two"}
    for on_rank in rank_pool(2).run(train_and_evaluate_pairs, preference_run(documents, tmp_path, layout)):
        assert on_rank == [pytest.approx(values, rel=1e-10) for values in on_one_rank]


@pytest.mark.parametrize(
    "layout",
    [
        {"layout.tp": 2},
        {"layout.tp": 2, "layout.sequence_parallel": False},
        {"layout.data_parallel": "zero3"},
        {"layout.pp": 2, "layout.schedule": "zb-h1"},
        {"layout.cp": 2},
    ],
    ids=str,
)
def test_pairs_train_equally_if_logits_do_not_fit(layout: dict[str, Any], documents: Path, tmp_path: Path) -> None:
    on_one_rank = rank_pool(1).run(train_and_evaluate_pairs, preference_run(documents, tmp_path))[0]
    run = preference_run(documents, tmp_path, {**layout, "name": "two"})
    for on_rank in rank_pool(2).run(train_in_chunks, run):
        assert on_rank == [pytest.approx(values, rel=1e-10) for values in on_one_rank]


def train_in_chunks(run: RunSpec) -> list[list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "LOGITS_CHUNK_BYTES", 50 * 257 * 8 // run.layout.tp)
        return train_and_evaluate_pairs(run)


def train_and_evaluate_pairs(run: RunSpec) -> list[list[float]]:
    """Return the loss, the gradient norm, the accuracy and the margin of each step, and of the evaluation."""
    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, run.training.steps)
    records = [trainer.train_step(batches) for _ in range(run.training.steps)]
    names = ("loss", "grad_norm", "pair_accuracy", "reward_margin", "pairs")
    # Before the first update all rewards are 0, up to rounding, which decides their order.
    records[0]["pair_accuracy"] = 0.0
    result = [[record[name] for name in names] for record in records]
    evaluation = trainer.evaluate()
    return [
        *result,
        [value for name, value in evaluation.items() if name.startswith("held_out") and name[-3:] != "set"],
    ]


HYBRIDS: list[dict[str, Any]] = [
    {"layout.data_parallel": "zero3", "layout.cp": 2},
    {"layout.tp": 2, "layout.pp": 2, "layout.schedule": "1f1b"},
    {"layout.cp": 2, "layout.pp": 2, "layout.schedule": "1f1b"},
    {"layout.data_parallel": "zero1", "layout.tp": 2},
    {"model": MOE, "layout.tp": 2, "layout.ep": 2, "layout.data_parallel": "zero3"},
    {"model": MOE, "layout.pp": 2, "layout.ep": 2, "layout.schedule": "1f1b"},
]


@pytest.mark.parametrize("layout", HYBRIDS, ids=str)
def test_pairs_train_equally_in_hybrid_layouts(layout: dict[str, Any], documents: Path, tmp_path: Path) -> None:
    changes = {name: value for name, value in layout.items() if name == "model"}
    on_one_rank = rank_pool(1).run(train_and_evaluate_pairs, preference_run(documents, tmp_path, changes))[0]
    for on_rank in rank_pool(4).run(
        train_and_evaluate_pairs, preference_run(documents, tmp_path, {**layout, "name": "four"})
    ):
        assert on_rank == [pytest.approx(values, rel=1e-10) for values in on_one_rank]


def train_past_checkpoint(run: RunSpec) -> list[tuple[float, float]]:
    """Save a checkpoint after two steps, and return the loss and the norm of the third."""
    claim_run_directory(run_directory(run))
    trainer = make_trainer(run)
    train_until(trainer, 2)
    trainer.save()
    trainer.checkpointer.wait()
    return train_until(trainer, 3)


def test_interrupted_run_reads_its_reference(documents: Path, tmp_path: Path) -> None:
    run = preference_run(documents, tmp_path)
    expected = train_past_checkpoint(run)
    resumed = make_trainer(run)
    resumed.resume()
    assert train_until(resumed, 3) == expected
    (resumed.directory / "reference.npz").write_bytes(b"damaged")
    damaged = make_trainer(run)
    damaged.resume()
    for start in (lambda: train_until(damaged, 3), lambda: check_and_prepare(run, 1, resume=True)):
        with pytest.raises(UserError, match=r"reference\.npz' is missing or damaged"):
            start()


def test_new_weights_have_a_new_reference(documents: Path, tmp_path: Path) -> None:
    """A directory whose run has not started yet may have the reference of another model."""
    first = make_trainer(preference_run(documents, tmp_path))
    second = make_trainer(preference_run(documents, tmp_path, {"training.seed": 7}))
    for trainer in (first, second):
        trainer.prepare_reference()
    assert first.reference is not None
    assert second.reference is not None
    assert not np.allclose(first.reference.train, second.reference.train)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preference": None}, r"data\.format = 'preference' needs the settings of its loss"),
        ({"data.format": "prompt"}, r"preference needs pairs of answers, but data\.format is 'prompt'"),
        ({"data.mask_documents": False}, r"data\.mask_documents cannot be combined with \[preference\]"),
        ({"layout.data_parallel": "parameter_server"}, r"layout\.data_parallel cannot be combined with \[preference\]"),
        ({"model": {**DENSE, "mtp": {"layers": 1}}}, r"model\.mtp cannot be combined with \[preference\]"),
        (
            {"preference.loss": "ipo", "preference.label_smoothing": 0.1},
            r"preference\.label_smoothing = 0\.1 has no effect",
        ),
        ({"training.seq_len": 64, "training.tokens_per_step": 512}, r"has \d+ preferences of \d+ with more than 65"),
    ],
    ids=str,
)
def test_invalid_runs_are_refused(changes: dict[str, Any], message: str, documents: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        create_run(preference_run(documents, tmp_path, changes), 1, resume=False)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "is not a pair: .*:1 has no fields 'chosen' and 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has equal answers 'chosen' and 'rejected' in .*:1"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "has an empty answer in .*:1"),
        ({"chosen": "the same", "rejected": "the same and more"}, "has an empty answer in .*:1"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "has no messages in .*:1"),
        ({"messages": [{"role": "user", "content": "a"}]}, 'set data.format = "chat"'),
    ],
    ids=str,
)
def test_broken_pairs_are_named(record: dict[str, Any], message: str, documents: Path, tmp_path: Path) -> None:
    run = preference_run(documents, tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(preference(1)))
    with pytest.raises(UserError, match=message):
        create_run(run, 1, resume=False)


def test_tokens_of_pairs_are_for_preferences_only(documents: Path, tmp_path: Path) -> None:
    tokens = str(make_trainer(preference_run(documents, tmp_path)).corpus.train.prefix)
    run = preference_run(
        documents, tmp_path, {"data.train": tokens, "data.held_out": tokens.replace("train", "held_out")}
    )
    assert make_trainer(run).loader.step(0).pairs is not None
    with pytest.raises(UserError, match="has pairs of chosen and rejected answers"):
        prepare(run.data.replace(format="text"))


def test_rows_of_a_step_are_named(documents: Path, tmp_path: Path) -> None:
    """A record has two documents, both at its line."""
    run = preference_run(documents, tmp_path)
    create_run(run, 1, resume=False)
    documents_of_row = rows_of_step(run_directory(run), 1)[0].documents
    assert len(documents_of_row) >= 2
    assert documents_of_row[0].location == documents_of_row[1].location
    assert str(documents_of_row[0].location).startswith(str(tmp_path / "pairs.jsonl"))
    number = int(str(documents_of_row[0].location).rpartition(":")[2]) - 1
    assert documents_of_row[1].text == f"What is {number} + 1? Perhaps {number}"[: len(documents_of_row[1].text)]


MESSAGES = [{"role": "user", "content": "Name a color."}]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": MESSAGES, "chosen": "Red.", "rejected": "Dog."},
        {"prompt": "Name a color.", "chosen": [answer("Red.")], "rejected": [answer("Dog.")]},
        {"prompt": MESSAGES, "chosen": [answer("Red.")], "rejected": [answer("Dog.")]},
        {"chosen": [*MESSAGES, answer("Red.")], "rejected": [*MESSAGES, answer("Dog.")]},
        {"prompt": "Name a color.", "chosen": [*MESSAGES, answer("Red.")], "rejected": [*MESSAGES, answer("Dog.")]},
        {"prompt": MESSAGES, "chosen": [*MESSAGES, answer("Red.")], "rejected": [*MESSAGES, answer("Dog.")]},
    ],
    ids=str,
)
def test_forms_of_conversations_are_equal(record: dict[str, Any]) -> None:
    template = ChatTemplate(BUILT_IN_TEMPLATES["plain"], (("eos_token", "<end>"),))
    read = PreferenceFormat(template).read(record)
    assert read.rejected is not None
    for text, word in ((read, "Red."), (read.rejected, "Dog.")):
        assert text.text == f"User: Name a color.\nAssistant: {word}<end>\n"
        assert text.answers is not None
        assert [text.text[start:end] for start, end in text.answers] == [f"{word}<end>"]


def test_texts_without_a_prompt_differ_after_their_common_beginning() -> None:
    read = PreferenceFormat().read({"chosen": "Human: hi\n\nAssistant: yes", "rejected": "Human: hi\n\nAssistant: no"})
    assert read.rejected is not None
    assert read.answers is not None
    assert read.text[slice(*read.answers[0])] == "yes"


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_an_epoch_has_each_pair_once(too_long: str, documents: Path, tmp_path: Path) -> None:
    """Each document of a long pair is limited to half of a row."""
    changes = {"data.too_long": too_long, "training.seq_len": 69, "training.tokens_per_step": 69}
    loader = make_trainer(preference_run(documents, tmp_path, changes)).loader.loader
    dataset = loader.dataset
    rows = loader.read_rows(1, np.arange(loader.sequences_per_epoch))
    texts = [dataset.document(number) for number in range(len(dataset))]
    is_long = [len(chosen) + len(rejected) > 70 for chosen, rejected in zip(texts[::2], texts[1::2], strict=True)]
    assert 0 < sum(is_long) < len(is_long)
    kept = [number for number in range(len(dataset)) if too_long == "truncate" or not is_long[number // 2]]
    assert sorted(rows.pairs.documents.tolist()) == kept
    for answer_number, number in enumerate(rows.pairs.documents.tolist()):
        expected = texts[number][:35] if is_long[number // 2] else texts[number]
        (row,) = {int(row) for row in np.nonzero(rows.pairs.answer_of_token == answer_number)[0]}
        assert row == rows.pairs.rows[answer_number // 2]
        tokens = rows.tokens[row][rows.pairs.answer_of_token[row] == answer_number]
        # The last token of a row is a target only.
        assert tokens.tolist() == token_ids(expected)[: len(tokens)].tolist()
        assert len(tokens) >= len(expected) - 1
        targets = rows.targets[row][rows.pairs.answer_of_token[row] == answer_number]
        assert (targets >= 0).sum() == (expected >= 0).sum()


LONG = {"training.seq_len": 1024, "training.tokens_per_step": 16 * 1024}


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {"layout.cp": 2}),
        (4, {"layout.cp": 2, "layout.pp": 2, "layout.schedule": "1f1b"}),
        (2, {"layout.tp": 2, "model": {**DENSE, "vocab_size": 300_000, "max_seq_len": 1024}, **LONG}),
    ],
    ids=["cp", "cp-pp", "tp with chunks of logits"],
)
def test_dry_run_agrees_with_plan(world_size: int, changes: dict[str, Any], documents: Path, tmp_path: Path) -> None:
    resolved = ResolvedRun(preference_run(documents, tmp_path, changes), world_size)
    for traced in trace_ranks(resolved, [0, world_size - 1]):
        assert [line for line in compare_with_plan(resolved, traced) if not line.agrees] == []


def test_plan_says_that_the_reference_takes_time(documents: Path, tmp_path: Path) -> None:
    resolved = ResolvedRun(preference_run(documents, tmp_path), 1)
    assert any("the reference's forward pass" in assumption for assumption in list_assumptions(resolved, []))


def test_end_of_a_file_is_held_out_in_whole_pairs(documents: Path, tmp_path: Path) -> None:
    """A fraction that selects no record by its name takes the end of the file."""
    corpus = make_trainer(preference_run(documents, tmp_path, {"data.held_out_fraction": 1e-9})).corpus
    assert corpus.train is not None
    assert (len(corpus.train), len(corpus.held_out)) == (2 * NUM_PAIRS - 2, 2)
    trainer = make_trainer(preference_run(documents, tmp_path, {"data.held_out_fraction": 1e-9}))
    assert trainer.evaluate()["held_out_pairs"] == 1


def test_resume_on_other_ranks_keeps_the_reference(documents: Path, tmp_path: Path) -> None:
    run = preference_run(documents, tmp_path)
    expected = train_past_checkpoint(run)
    for on_rank in rank_pool(2).run(resume_and_train, preference_run(documents, tmp_path, {"layout.cp": 2})):
        assert on_rank == [pytest.approx(values, rel=1e-10) for values in expected]


def resume_and_train(run: RunSpec) -> list[tuple[float, float]]:
    trainer = make_trainer(run)
    trainer.resume()
    return train_until(trainer, run.training.steps)
