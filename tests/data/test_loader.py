"""Packing, compared with a brute-force reference that walks the documents token by token."""

import json
import math
import threading
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter, split_tail
from phalanx.data.loader import TokenLoader, evaluation_batches, prefetch, rank_rows
from phalanx.data.packing import IGNORE_INDEX, Batch, shuffle_epoch
from phalanx.spec.errors import UserError
from tests.helpers.batches import batch_rows

lengths = st.lists(st.integers(0, 25), min_size=1, max_size=15)


def write_dataset_of_unique_tokens(folder, lengths):
    """Write documents whose tokens are all different, so that a token identifies its position."""
    begin = 0
    with IndexedWriter(folder / "tokens", np.dtype(np.uint16)) as writer:
        for length in lengths:
            writer.add(np.arange(begin, begin + length))
            begin += length
    return IndexedDataset(folder / "tokens")


def reference_rows(dataset, sequence, seed, epoch):
    """Return the rows of an epoch in their order, as (tokens, targets, starts), computed token by token."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    stream = []
    for document in generator.permutation(len(dataset)):
        stream += [(int(token), offset) for offset, token in enumerate(dataset.document(document))]
    rows = []
    for first in range(0, len(stream) - sequence, sequence):
        row, starts = stream[first : first + sequence + 1], []
        for position, (_, offset) in enumerate(row[:-1]):
            starts.append(position - min(offset, position))
        ids = [token for token, _ in row]
        rows.append((ids[:-1], ids[1:], starts))
    return [rows[i] for i in generator.permutation(len(rows))]


@settings(max_examples=60, deadline=None)
@given(lengths=lengths, sequence=st.integers(1, 12), per_step=st.integers(1, 7), seed=st.integers(0, 9))
def test_token_loader_batches_match_reference_over_epochs(tmp_path_factory, lengths, sequence, per_step, seed):
    dataset = write_dataset_of_unique_tokens(tmp_path_factory.mktemp("data"), lengths)
    if dataset.size <= sequence:
        with pytest.raises(UserError, match=f"has {dataset.size} tokens.* needs {sequence + 1}") as caught:
            TokenLoader(dataset, sequence, per_step, seed).require_one_sequence()
        assert caught.value.field == "data.train"
        return
    loader = TokenLoader(dataset, sequence, per_step, seed)
    expected = list(chain(*(reference_rows(dataset, sequence, seed, epoch) for epoch in range(3))))
    for step in range(len(expected) // per_step):
        assert batch_rows(loader.step(step)) == expected[step * per_step : (step + 1) * per_step]


@settings(max_examples=40, deadline=None)
@given(lengths=lengths, sequence=st.integers(1, 10), epoch=st.integers(0, 3))
def test_token_loader_epoch_yields_each_token_once_except_remainder(tmp_path_factory, lengths, sequence, epoch):
    dataset = write_dataset_of_unique_tokens(tmp_path_factory.mktemp("data"), [*lengths, 30])
    per_epoch = TokenLoader(dataset, sequence, 1, 0).sequences_per_epoch
    loader = TokenLoader(dataset, sequence, per_epoch, seed=0)
    batch = loader.step(epoch)
    order = shuffle_epoch(dataset.offsets, sequence, 0, epoch)
    begins, shifts = order.documents.T
    ends = np.append(begins[1:], dataset.size)
    stream = np.concatenate([dataset.tokens[b + s : e + s] for b, e, s in zip(begins, ends, shifts, strict=True)])
    num_targets = per_epoch * sequence
    assert sorted(batch.tokens.ravel()) == sorted(stream[:num_targets])
    assert sorted(batch.targets.ravel()) == sorted(stream[1 : num_targets + 1])
    assert dataset.size - 1 - num_targets < sequence
    assert sorted(stream) == dataset.tokens.tolist()


@settings(max_examples=30, deadline=None)
@given(
    lengths=lengths, sequence=st.integers(1, 9), rows_per_rank=st.integers(1, 3), ranks=st.sampled_from([1, 2, 3, 4, 6])
)
def test_token_loader_global_batch_is_independent_of_rank_count(
    tmp_path_factory, lengths, sequence, rows_per_rank, ranks
):
    dataset = write_dataset_of_unique_tokens(tmp_path_factory.mktemp("data"), [*lengths, 10])
    reference = TokenLoader(dataset, sequence, rows_per_rank * ranks, seed=5)
    parts = [TokenLoader(dataset, sequence, rows_per_rank * ranks, 5, rank, ranks) for rank in range(ranks)]
    for step in (0, 3, 11):
        batches = [part.step(step) for part in parts]
        assert all(batch.tokens.shape == (rows_per_rank, sequence) for batch in batches)
        assert list(chain(*map(batch_rows, batches))) == batch_rows(reference.step(step))


def test_token_loader_batch_has_expected_dtypes_shapes_and_layout(write_tokens):
    batch = TokenLoader(write_tokens([[1, 2, 3], [4, 5, 6, 7, 8, 9]]), 4, 2, 0).step(0)
    assert batch.tokens.dtype == batch.targets.dtype == np.int64
    assert batch.document_starts.dtype == np.int32
    assert batch.tokens.shape == batch.targets.shape == batch.document_starts.shape == (2, 4)
    assert batch.tokens.flags.c_contiguous
    assert batch.targets.flags.c_contiguous
    assert batch.tokens.flags.writeable


def test_token_loader_omits_document_starts_when_no_mask_is_needed(write_tokens):
    documents = [list(range(8)), list(range(8)), list(range(8))]
    # A document per sequence: none begins inside one.
    assert TokenLoader(write_tokens(documents), 8, 2, 0).step(0).document_starts is None
    assert TokenLoader(write_tokens(documents), 7, 3, 0).step(0).document_starts is not None
    assert TokenLoader(write_tokens(documents), 7, 3, 0, mask_documents=False).step(0).document_starts is None


def test_token_loader_omits_mask_when_document_starts_at_last_target(write_tokens):
    dataset = write_tokens([[1, 1, 1, 1], [2, 2, 2, 2]])
    batch = TokenLoader(dataset, 4, 1, 0).step(0)
    assert batch.targets[0, -1] != batch.tokens[0, -1]
    assert batch.document_starts is None


def test_token_loader_order_depends_only_on_seed_and_epoch(write_tokens):
    dataset = write_tokens([list(range(i, i + 9)) for i in range(0, 900, 9)])
    batches = {
        (seed, epoch): TokenLoader(dataset, 8, 100, seed).step(epoch).tokens.tolist()
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len({json.dumps(batch) for batch in batches.values()}) == 4
    assert TokenLoader(dataset, 8, 100, 1).step(0).tokens.tolist() == batches[1, 0]


def test_token_loader_shuffles_sequences_within_epoch(write_tokens):
    dataset = write_tokens([list(range(4001))])
    first = TokenLoader(dataset, 4, 1000, 0).step(0).tokens[:, 0]
    assert sorted(first) == list(range(0, 4000, 4))
    assert np.mean(np.abs(np.diff(first)) == 4) < 0.02


def test_token_loader_step_can_span_epochs(write_tokens):
    dataset = write_tokens([[1, 2, 3, 4, 5]])
    loader = TokenLoader(dataset, 2, 5, 0)
    assert loader.sequences_per_epoch == 2
    rows = loader.step(0).tokens.tolist()
    assert sorted(rows[:2]) == sorted(rows[2:4]) == [[1, 2], [3, 4]]
    assert rows[4] in rows[:2]
    assert loader.state(1)["epoch"] == 2
    assert loader.state(1)["position"] == 1


def test_rank_rows_partition_batch_and_differ_by_at_most_one():
    shares = [rank_rows(8, rank, 3).tolist() for rank in range(3)]
    assert shares == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_token_loader_resumes_at_same_position_with_new_batch_size(write_tokens):
    dataset = write_tokens([list(range(100))])
    small, large = TokenLoader(dataset, 4, 2, 3), TokenLoader(dataset, 4, 6, 3)
    large.resume(small.state(3))
    assert large.step(3).tokens.tolist() == [row for n in (3, 4, 5) for row in small.step(n).tokens.tolist()]
    assert large.state(3)["position"] == small.state(3)["position"] == 6
    assert large.state(4)["position"] == small.state(6)["position"]


def test_token_loader_with_another_length_starts_the_next_epoch(write_tokens):
    dataset = write_tokens([list(range(101))])
    short, long = TokenLoader(dataset, 4, 10, 3), TokenLoader(dataset, 20, 1, 3)
    long.resume(short.state(0))
    assert (long.state(0)["epoch"], long.state(0)["position"]) == (0, 0)
    long.resume(short.state(3))  # 30 of the 25 sequences of an epoch
    assert (long.state(3)["epoch"], long.state(3)["position"]) == (2, 0)
    assert long.step(3).tokens.tolist() == TokenLoader(dataset, 20, 1, 3).step(10).tokens.tolist()


def test_token_loader_skip_steps_equals_consuming_steps(write_tokens):
    dataset = write_tokens([list(range(50))])
    consuming, skipping = (TokenLoader(dataset, 4, 3, seed=1) for _ in range(2))
    skipping.resume(consuming.state(2))
    skipping.skip_steps(5)
    assert batch_rows(skipping.step(3)) == batch_rows(consuming.step(8))
    resumed = TokenLoader(dataset, 4, 3, seed=1)
    resumed.resume(skipping.state(3))
    assert batch_rows(resumed.step(3)) == batch_rows(consuming.step(8))


def test_token_loader_state_round_trips_json_and_resumes_at_any_rank_count(write_tokens):
    dataset = write_tokens([list(range(50)), list(range(30))])
    loader = TokenLoader(dataset, 8, 2, seed=3)
    state = json.loads(json.dumps(loader.state(7)))
    assert {name: state[name] for name in ("epoch", "position", "seed", "sequence")} == {
        "epoch": 1,
        "position": 5,
        "seed": 3,
        "sequence": 8,
    }
    loader.resume(state)
    TokenLoader(dataset, 8, 2, 3, rank=1, ranks=2).resume(state)  # fewer or more ranks may resume


def test_token_loader_rejects_checkpoint_with_another_seed(write_tokens):
    dataset = write_tokens([list(range(50))])
    state = TokenLoader(dataset, 8, 2, seed=3).state(1)
    with pytest.raises(UserError, match="differs from the checkpoint's value") as caught:
        TokenLoader(dataset, 8, 2, seed=4).resume(state)
    assert caught.value.field == "training.seed"


def test_token_loader_rejects_checkpoint_of_other_data(write_tokens):
    state = TokenLoader(write_tokens([list(range(50))]), 8, 2, 3).state(1)
    with pytest.raises(UserError, match=r"^data differs from the checkpoint's data"):
        TokenLoader(write_tokens([list(range(1, 51))]), 8, 2, 3).resume(state)


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths,
    sequence=st.integers(1, 9),
    rows=st.integers(1, 4),
    ranks=st.integers(1, 4),
    limit=st.integers(0, 200),
    tail=st.booleans(),
)
def test_evaluation_batches_cover_every_target_once(tmp_path_factory, lengths, sequence, rows, ranks, limit, tail):
    folder = tmp_path_factory.mktemp("data")
    dataset = write_dataset_of_unique_tokens(folder, [*lengths, 4])
    if tail:  # its documents do not begin where its file does
        split_tail(dataset, 0.5, folder / "head", folder / "tail")
        dataset = IndexedDataset(folder / "tail")
    flat = np.concatenate([dataset.document(i) for i in range(len(dataset))])
    wanted = flat[1:][: limit or None].tolist()
    by_rank = [list(evaluation_batches(dataset, sequence, rows, rank, ranks, limit)) for rank in range(ranks)]
    assert len({len(batches) for batches in by_rank}) == 1
    assert len(by_rank[0]) == math.ceil(math.ceil(len(wanted) / sequence) / (rows * ranks))
    targets_read, document_starts = [], set((dataset.offsets - dataset.offsets[0]).tolist())
    for batches_of_step in zip(*by_rank, strict=True):
        for batch in batches_of_step:
            assert batch.tokens.shape == (rows, sequence)
            for tokens, targets, starts in batch_rows(batch):
                for position, target in enumerate(targets):
                    if target == IGNORE_INDEX:
                        continue
                    index = len(targets_read)
                    assert tokens[position] == flat[index]
                    starts_in_row = [
                        index - distance for distance in range(position + 1) if index - distance in document_starts
                    ]
                    assert starts[position] == position - (index - starts_in_row[0] if starts_in_row else position)
                    targets_read.append(target)
    assert targets_read == wanted


def test_evaluation_batches_pad_with_ignore_index(write_tokens):
    batches = list(evaluation_batches(write_tokens([[1, 2, 3, 4, 5, 6]]), 4, 1, rank=1, ranks=3))
    assert [batch.targets.tolist() for batch in batches] == [[[6, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]]
    (last,) = evaluation_batches(write_tokens([[1, 2, 3, 4, 5, 6]]), 4, 1, rank=2, ranks=3)
    assert (last.targets == IGNORE_INDEX).all()


def test_evaluation_batches_omit_document_starts_without_masking(write_tokens):
    dataset = write_tokens([[1, 2], [3, 4, 5]])
    assert next(evaluation_batches(dataset, 4, 1)).document_starts.tolist() == [[0, 0, 2, 2]]
    assert next(evaluation_batches(dataset, 4, 1, mask_documents=False)).document_starts is None


def test_evaluation_batches_reject_dataset_without_targets(write_tokens):
    with pytest.raises(UserError, match="has too few tokens for an evaluation") as caught:
        next(evaluation_batches(write_tokens([[1]]), 4, 1))
    assert caught.value.field == "data.held_out"


class CountingLoader:
    """A loader that counts its batches and can fail."""

    def __init__(self, fails_at=None):
        self.made, self.fails_at = [], fails_at
        self.changed = threading.Condition()

    def step(self, number):
        if number == self.fails_at:
            raise UserError("data.train", None, "cannot be read")
        with self.changed:
            self.made.append(number)
            self.changed.notify_all()
        return Batch(np.full((1, 1), number), np.zeros((1, 1)), None)

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.made) >= count, timeout=10)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "phalanx-data"]


def test_prefetch_yields_steps_in_order():
    loader = CountingLoader()
    assert [int(batch.tokens[0, 0]) for batch in prefetch(loader, 3, 9)] == [3, 4, 5, 6, 7, 8]
    assert loader.made == [3, 4, 5, 6, 7, 8]
    assert prefetch_threads() == []
    assert list(prefetch(loader, 5, 5)) == []


def test_prefetch_reads_ahead_at_most_depth_batches():
    loader = CountingLoader()
    batches = prefetch(loader, 0, 100, depth=3)
    next(batches)
    loader.wait_for(4)  # the one that was taken, and three more ahead of it
    batches.close()
    assert loader.made == [0, 1, 2, 3]
    assert prefetch_threads() == []


def test_prefetch_raises_loader_error_after_earlier_batches():
    batches = prefetch(CountingLoader(fails_at=2), 0, 5)
    assert [next(batches).tokens[0, 0], next(batches).tokens[0, 0]] == [0, 1]
    with pytest.raises(UserError, match="cannot be read"):
        next(batches)
    assert prefetch_threads() == []


def test_prefetch_thread_stops_when_consumer_breaks_early():
    for batch in prefetch(CountingLoader(), 0, 1_000_000):
        if batch.tokens[0, 0] == 3:
            break
    del batch
    assert prefetch_threads() == []
