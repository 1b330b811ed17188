"""Rows of conversations: each is in one row, packed tightly, and only answers are targets."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter
from phalanx.data.loader import TokenLoader, evaluation_batches
from phalanx.data.packing import IGNORE_INDEX
from phalanx.data.pair_metadata import write_pair_metadata
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.data.whole_documents import best_fit_decreasing, pack_whole
from phalanx.spec.errors import UserError

SEQ_LEN = 8


def write_conversations(folder: Path, conversations: list[list[int]]) -> IndexedDataset:
    prefix = folder / "chats"
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        for tokens in conversations:
            writer.add(np.array(tokens))
    write_pair_metadata(prefix, byte_tokenizer(), kind="chat")
    return IndexedDataset(prefix)


# Each conversation has tokens of its own, the first half of which are inputs only.
@st.composite
def conversations(draw: st.DrawFn) -> list[list[int]]:
    lengths = draw(st.lists(st.integers(2, SEQ_LEN + 4), min_size=1, max_size=12))
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        [~token if token - start < max(1, length // 2) else token for token in range(start, start + length)]
        for start, length in zip(starts, lengths, strict=False)
    ]


@given(conversations(), st.integers(0, 3), st.sampled_from(["drop", "truncate"]))
def test_an_epoch_has_each_conversation_once_and_whole(tmp_path_factory, chats, epoch, too_long):
    dataset = write_conversations(tmp_path_factory.mktemp("chats"), chats)
    kept = [chat[: SEQ_LEN + 1] for chat in chats if too_long == "truncate" or len(chat) <= SEQ_LEN + 1]
    if not kept:
        with pytest.raises(UserError, match="no conversation with an answer"):
            TokenLoader(dataset, SEQ_LEN, 1, seed=3, too_long=too_long)
        return
    loader = TokenLoader(dataset, SEQ_LEN, 1, seed=3, too_long=too_long)
    rows = loader.read_rows(epoch, np.arange(loader.sequences_per_epoch))
    # Padding has no targets, so that a row has each of its targets after the inputs of the same conversation.
    targets = sorted(target for target in rows.targets.ravel().tolist() if target != IGNORE_INDEX)
    assert targets == sorted(token for chat in kept for token in chat[1:] if token >= 0)
    for tokens, row_targets in zip(rows.tokens.tolist(), rows.targets.tolist(), strict=True):
        for position, target in enumerate(row_targets):
            if target != IGNORE_INDEX:
                chat = next(chat for chat in kept if target in chat)
                place = chat.index(target)
                visible = [~token if token < 0 else token for token in chat[:place]]
                assert tokens[position + 1 - place : position + 1] == visible
                starts = rows.document_starts
                row = rows.tokens.tolist().index(tokens)
                assert starts is None or starts[row, position] == position + 1 - place


@given(st.lists(st.integers(1, 20), max_size=60))
def test_bins_are_not_overfull_and_few(lengths):
    bins = best_fit_decreasing(np.array(lengths, np.int64), 20)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    fill = [sum(lengths[item] for item in items) for items in bins]
    assert all(size <= 20 for size in fill)
    # The bound of the paper holds for the optimum, which needs at least this many.
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // 20) * 1.5 + 1


def test_long_conversations_are_an_error_by_default(tmp_path):
    dataset = write_conversations(tmp_path, [[~1, 2], [~3, *range(4, 20)]])
    with pytest.raises(UserError, match=r"1 conversation of 2 with more than 9 tokens, the longest with 17") as caught:
        TokenLoader(dataset, SEQ_LEN, 1, seed=0)
    assert 'data.too_long = "drop" or "truncate"' in caught.value.fix
    assert len(pack_whole(dataset, 16, "error").rows) == 2


def test_rows_do_not_depend_on_ranks_and_resume(tmp_path):
    dataset = write_conversations(tmp_path, [[~number, number + 1, number + 2] for number in range(0, 90, 3)])
    one = TokenLoader(dataset, SEQ_LEN, 4, seed=1)
    ranks = [TokenLoader(dataset, SEQ_LEN, 4, 1, rank, 2) for rank in range(2)]
    for step in range(6):
        rows = np.concatenate([loader.step(step).tokens for loader in ranks])
        assert np.array_equal(rows, one.step(step).tokens)
    resumed = TokenLoader(dataset, SEQ_LEN, 4, seed=1)
    resumed.resume(one.state(3))
    assert np.array_equal(resumed.step(4).targets, one.step(4).targets)
    with pytest.raises(UserError, match="differs from the checkpoint's data"):
        TokenLoader(dataset, SEQ_LEN, 4, seed=1, too_long="drop").resume(one.state(3))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_has_every_answer_once(tmp_path, ranks):
    chats = [[~number, ~(number + 1), number + 2, number + 3] for number in range(0, 80, 4)]
    dataset = write_conversations(tmp_path, chats)
    batches = [list(evaluation_batches(dataset, SEQ_LEN, 2, rank, ranks)) for rank in range(ranks)]
    assert len({len(own) for own in batches}) == 1
    targets = [target for own in batches for batch in own for target in batch.targets.ravel().tolist()]
    assert sorted(target for target in targets if target != IGNORE_INDEX) == sorted(
        token for chat in chats for token in chat if token >= 0
    )
    limited = [list(evaluation_batches(dataset, SEQ_LEN, 2, rank, ranks, limit_tokens=3)) for rank in range(ranks)]
    assert {len(own) for own in limited} == {1}


def test_documents_of_a_row_are_located(tmp_path):
    dataset = write_conversations(tmp_path, [[~1, 2, 3], [~4, 5, 6, 7]])
    (spans,) = [TokenLoader(dataset, SEQ_LEN, 1, seed=0).document_spans(0)]
    assert [(span.document, span.first, span.position, span.tokens) for span in spans] == [(1, 0, 0, 4), (0, 0, 4, 3)]
