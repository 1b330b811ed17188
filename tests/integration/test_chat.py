"""Training on conversations mixed with text: only answers count, and all layouts agree."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.data.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from phalanx.data.checked_loader import CheckedLoader
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader
from phalanx.data.packing import token_ids
from phalanx.data.pair_metadata import recorded_kind
from phalanx.data.prepare import prepare
from phalanx.spec import chunks
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.create_run import create_run
from tests.helpers.small_runs import DENSE, make_trainer, small_run, training_trajectory

NUM_CHATS = 60


def conversation(number: int) -> list[dict[str, str]]:
    messages = [
        {"role": "user", "content": f"What is {number} + 1?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
    ]
    return messages * (1 + number % 2)


def weight(number: int) -> float:
    return (1, 0.3, 2.5)[number % 3]


def write_chats(path: Path, weigh: Callable[[int], float] = lambda number: 1) -> None:
    rows = [{"messages": conversation(number), "weight": weigh(number)} for number in range(NUM_CHATS)]
    path.write_text("\n".join(map(json.dumps, rows)))


def chat_run(text: Path, out: Path, changes: dict[str, Any] | None = None, **chat: Any) -> RunSpec:
    """Return a run on the Python files of a folder and on conversations with weights, in equal parts."""
    write_chats(out / "chats.jsonl", weight)
    code = {"name": "code", "path": str(text), "weight": 1}
    chats = {"name": "chats", "path": str(out / "chats.jsonl"), "weight": 1, "format": "chat", **chat}
    data = {
        "source": [code, chats],
        "tokenizer": "bytes",
        "chat_template": "plain",
        "cache": str(out / "cache"),
        "held_out_fraction": 0.2,
        "too_long": "truncate",
    }
    return small_run(text, out, {"data": data, "training.steps": 3, "training.seq_len": 64, **(changes or {})})


LAYOUTS: list[dict[str, Any]] = [
    {"layout.data_parallel": "zero3"},
    {"layout.tp": 2},
    {"layout.pp": 2, "layout.schedule": "1f1b"},
    {"layout.cp": 2},
    {"layout.cp": 2, "layout.cp_method": "ulysses"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_conversations_train_equally_in_layouts(layout: dict[str, Any], documents: Path, tmp_path: Path) -> None:
    on_one_rank = rank_pool(1).run(training_trajectory, chat_run(documents, tmp_path))[0]
    for on_rank in rank_pool(2).run(training_trajectory, chat_run(documents, tmp_path, layout)):
        assert on_rank == [pytest.approx(values, rel=1e-10) for values in on_one_rank]


def test_held_out_loss_is_that_of_answers_one_conversation_at_a_time(documents: Path, tmp_path: Path) -> None:
    """Neither packing nor padding changes the loss of the tokens that the assistant wrote."""
    run = chat_run(documents, tmp_path)
    trainer = make_trainer(run)
    seq_len = run.training.seq_len
    tokenizer = trainer.corpus.tokenizer
    template = ChatTemplate(BUILT_IN_TEMPLATES["plain"], (("eos_token", "<|endoftext|>"),))
    held_out = trainer.corpus.held_out_sources[1]
    texts = {tuple(abs_ids(held_out.document(number))) for number in range(len(held_out))}
    loss, count = 0.0, 0
    trainer.module.eval()
    for number in range(NUM_CHATS):
        text, spans = template.render_answers(conversation(number))
        ((ids, offsets),) = tokenizer.encode_with_offsets([text], has_special=True)
        if tuple(ids.tolist()) not in texts:
            continue
        ids, offsets = ids[: seq_len + 1], offsets[: seq_len + 1]
        with torch.no_grad():
            logits = trainer.module(torch.from_numpy(ids[:-1]).long()[None])[0][0]
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[1:]).long(), reduction="none")
        for position, (start, _) in enumerate(offsets[1:].tolist()):
            if any(first <= start < last for first, last in spans):
                loss += float(losses[position])
                count += 1
    record = trainer.evaluate()
    assert count > 20
    assert record["held_out_loss/chats"] == pytest.approx(loss / count, rel=1e-12)


def weighted_run(
    text: Path, out: Path, weigh: Callable[[int], float], changes: dict[str, Any] | None = None
) -> RunSpec:
    """Return a run on conversations alone."""
    write_chats(out / "chats.jsonl", weigh)
    data = {"train": str(out / "chats.jsonl"), "format": "chat", "tokenizer": "bytes", "chat_template": "plain"}
    data |= {"cache": str(out / "cache"), "held_out_fraction": 0.2}
    return small_run(text, out, {"data": data, "training.steps": 2, "training.seq_len": 128, **(changes or {})})


@pytest.mark.parametrize("chunked", [False, True])
def test_loss_is_the_mean_over_answers_by_their_weights(
    chunked: bool, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient of a step are those of a plain sum over conversations, each computed alone."""
    if chunked:
        monkeypatch.setattr(chunks, "LOGITS_CHUNK_BYTES", 100 * 257 * 8)
    trainer = make_trainer(weighted_run(documents, tmp_path, weight, {"training.precision": "fp64"}))
    assert (trainer.strategy.head_loss(torch.zeros(1, 128, dtype=torch.long), -100, None) is not None) is chunked
    model = copy.deepcopy(trainer.module)
    train = trainer.corpus.train
    assert isinstance(trainer.loader, CheckedLoader)
    assert isinstance(trainer.loader.loader, TokenLoader)
    sequences = trainer.loader.loader.sequences(0)
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for document in [span.document for loader, row in sequences for span in loader.document_spans(row)]:
        assert train is not None
        ids = torch.from_numpy(token_ids(train.document(document)))
        number = int(re.findall(r"What is (\d+)", trainer.corpus.tokenizer.decode(ids.tolist()))[0])
        losses = torch.nn.functional.cross_entropy(model(ids[None, :-1])[0][0], ids[1:], reduction="none")
        is_answer = torch.from_numpy(train.document(document)[1:] >= 0)
        total = total + weight(number) * losses[is_answer].sum()
        count += weight(number) * int(is_answer.sum())
    (total / count).backward()
    sums = trainer.forward_backward(trainer.micro_batches(trainer.loader.step(0)))
    reduced = trainer.unpack_sums(trainer.strategy.reduce(sums.packed).sums)
    assert float(reduced.tokens) == pytest.approx(count, rel=1e-12)
    assert float(reduced.loss) == pytest.approx(total.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trainer.strategy.gradients()[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_only_ratios_of_weights_count(documents: Path, tmp_path: Path) -> None:
    """Losses of multi-token prediction have the weights too."""
    mtp = {"model": {**DENSE, "mtp": {"layers": 2}}, "training.precision": "fp64"}
    weighed = training_trajectory(weighted_run(documents, tmp_path, weight, mtp))
    weighed_more = training_trajectory(weighted_run(documents, tmp_path, lambda number: 4 * weight(number), mtp))
    assert weighed_more == [pytest.approx(step, rel=1e-10) for step in weighed]


def test_weights_of_answers_cannot_be_combined_with_a_loss_of_the_user(documents: Path, tmp_path: Path) -> None:
    run = weighted_run(documents, tmp_path, weight, {"training.loss": {"class": "torch.nn.functional:cross_entropy"}})
    with pytest.raises(UserError, match=r"training\.loss = .* cannot be combined with conversations that have weights"):
        create_run(run, 1, resume=False)


def abs_ids(tokens: Any) -> list[int]:
    return token_ids(np.array(tokens)).tolist()


@pytest.mark.parametrize("field", ["held_out", "source's set", "other set"])
def test_held_out_text_of_a_mixture_needs_no_chat_template(field: str, documents: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("held-out words " * 100)
    text = [str(tmp_path / "text.txt")]
    changes: dict[str, dict[str, Any]] = {
        "held_out": {"data.held_out": text},
        "source's set": {"data.held_out_sets": {"code": text}},
        "other set": {"data.held_out_sets": {"words": text}},
    }
    prepared = prepare(chat_run(documents, tmp_path, changes[field]).data)
    assert recorded_kind(IndexedDataset(prepared.held_out)) == "text"


def test_conversations_are_held_out_beside_a_dataset_of_the_user(documents: Path, tmp_path: Path) -> None:
    run = weighted_run(documents, tmp_path, weight, {"data.dataset": {"class": "my_data:Rows"}})
    assert recorded_kind(IndexedDataset(prepare(run.data).held_out)) == "chat"


@pytest.mark.parametrize(
    ("chat", "data", "message"),
    [
        (
            {"text_key": "dialog"},
            {},
            r"data\.format = 'chat' is not a conversation: .*chats.jsonl:1 has no list 'dialog'",
        ),
        ({"format": "prompt"}, {}, r"data\.format = 'prompt' is not a pair: .*chats.jsonl:1 has no field 'prompt'"),
        (
            {"format": "text"},
            {"chat_template": None},
            r"data\.source\[1\]\.text_key = 'text' is not a field of .*chats.jsonl:1",
        ),
        ({"too_long": "error"}, {}, r"conversations? of \d+ with more than"),
        ({}, {"chat_template": None}, r"data\.tokenizer = 'bytes' has no chat template"),
        ({}, {"chat_template": "missing.jinja"}, r"data\.chat_template = .* cannot be read"),
        ({"format": "text"}, {}, r"data\.chat_template = 'plain' has no effect without conversations"),
    ],
)
def test_invalid_conversations_are_refused(
    chat: dict[str, Any], data: dict[str, Any], message: str, documents: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        create_run(
            chat_run(documents, tmp_path, {f"data.{name}": value for name, value in data.items()}, **chat),
            1,
            resume=False,
        )
