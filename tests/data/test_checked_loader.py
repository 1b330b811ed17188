"""Ids and targets outside the vocabulary are found on the host, before a step trains on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phalanx.data.checked_loader import CheckedLoader, check_ids
from phalanx.data.dataset_loader import open_dataset
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import StepLoader, TokenLoader
from phalanx.data.packing import IGNORE_INDEX, Batch
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from tests.data.test_dataset_loader import Samples, Stream
from tests.helpers.indexed_pairs import write_indexed_pair

VOCAB = 50
SEQ_LEN, ROWS = 4, 6
SPEC = ComponentSpec.model_validate({"class": "mine:Dataset"})


def samples(tokens: int = 1, target: int = 2) -> list[Any]:
    """Return samples of inputs and targets, of which the eighth has an id or a target of its own."""
    usual = (np.ones(SEQ_LEN, np.int64), np.full(SEQ_LEN, 2))
    other = (np.array([1, tokens, 1, 1]), np.array([2, 2, target, 2]))
    return [usual] * 7 + [other] + [usual] * 4


def checked(dataset: Any, rank: int = 0, ranks: int = 1, checks_targets: bool = True) -> CheckedLoader:
    loader = open_dataset(dataset, SPEC, SEQ_LEN, ROWS, seed=1, rank=rank, ranks=ranks)
    return CheckedLoader(loader, "data.dataset", SPEC.class_path, vocab_size=VOCAB, checks_targets=checks_targets)


def read_two_steps(loader: CheckedLoader) -> list[Batch]:
    return [loader.step(step) for step in range(2)]


@pytest.mark.parametrize("target", [0, VOCAB - 1, IGNORE_INDEX])
def test_ids_of_vocabulary_and_ignored_targets_are_accepted(target: int) -> None:
    loader = checked(Stream(samples(target=target)))
    assert read_two_steps(loader)[1].targets[1, 2] == target


@pytest.mark.parametrize("target", [-1, -7, -99, -101, VOCAB, 99999])
@pytest.mark.parametrize("masked", [2, IGNORE_INDEX])
def test_target_outside_vocabulary_is_refused_with_its_position(target: int, masked: int) -> None:
    data = samples(target=target)
    data[7][1][0] = masked  # an ignored target before it
    with pytest.raises(UserError) as caught:
        read_two_steps(checked(Stream(data)))
    fix = (
        "write -100 where there is no target"
        if target < 0
        else f"correct the data, or set model.vocab_size = {target + 1}"
    )
    assert str(caught.value) == (
        f"data.dataset = 'mine:Dataset' has the target {target} at position 2 of sample 7 (row 1 of step 2), "
        f"but targets are 0 to {VOCAB - 1} (model.vocab_size = {VOCAB}), or -100 to be ignored\n  fix: {fix}"
    )


@pytest.mark.parametrize("token", [-1, IGNORE_INDEX, VOCAB, 99999])
def test_id_outside_vocabulary_is_refused_with_its_position(token: int) -> None:
    with pytest.raises(UserError) as caught:
        read_two_steps(checked(Stream(samples(tokens=token))))
    fix = "correct the data" + (f", or set model.vocab_size = {token + 1}" if token > 0 else "")
    assert str(caught.value) == (
        f"data.dataset = 'mine:Dataset' has the token id {token} at position 1 of sample 7 (row 1 of step 2), "
        f"but ids are 0 to {VOCAB - 1} (model.vocab_size = {VOCAB})\n  fix: {fix}"
    )


def test_error_names_sample_and_global_row_on_the_rank_that_reads_it() -> None:
    dataset = Samples(samples(target=-1))
    messages = []
    for rank in range(3):
        loader = checked(dataset, rank, 3)
        try:
            read_two_steps(loader)
        except UserError as error:
            messages.append(str(error))
    (message,) = messages  # the others have read their rows
    order = open_dataset(dataset, SPEC, SEQ_LEN, ROWS, seed=1)
    rows = [(step, row) for step in range(2) for row, target in enumerate(order.step(step).targets[:, 2]) if target < 0]
    assert [f"sample 7 (row {row} of step {step + 1})" in message for step, row in rows] == [True]


def test_targets_of_own_loss_are_not_checked() -> None:
    loader = checked(Stream(samples(target=99999)), checks_targets=False)
    assert [batch.targets.max() for batch in read_two_steps(loader)] == [2, 99999]
    with pytest.raises(UserError, match="has the token id 50"):
        read_two_steps(checked(Stream(samples(tokens=VOCAB)), checks_targets=False))


def test_prepared_tokens_outside_vocabulary_are_refused(tmp_path: Any) -> None:
    dataset = IndexedDataset(write_indexed_pair(tmp_path / "pair", [[1, 2, 3, 4, 60]]))
    loader = CheckedLoader(TokenLoader(dataset, SEQ_LEN, 1, seed=0), "data.train", dataset.prefix, vocab_size=VOCAB)
    with pytest.raises(UserError, match=r"data\.train = .*has the target 60 at position 3 of row 0 of step 1, but"):
        loader.step(0)


def test_loader_without_rows_is_accepted() -> None:
    empty = np.zeros((0, SEQ_LEN), np.int64)
    check_ids(Batch(empty, empty, None), "data.dataset", "mine", vocab_size=VOCAB, locate=str)


def test_checked_loader_resumes_as_its_loader() -> None:
    plain: StepLoader = open_dataset(Samples(samples()), SPEC, SEQ_LEN, ROWS, seed=1)
    loader = checked(Samples(samples()))
    assert loader.state(3) == plain.state(3)
    for step_loader in (plain, loader):
        step_loader.resume(plain.state(3))
        step_loader.skip_steps(2)
    assert np.array_equal(loader.step(3).tokens, plain.step(3).tokens)
