"""The streaming loader equals a reference, resumes at any step, and gives the same batches at any number of ranks."""

import json
from itertools import chain

import numpy as np
import pytest

from phalanx.data.loader import prefetch
from phalanx.data.sources import documents, is_held_out, list_source_files, read_documents, read_records
from phalanx.data.streaming_loader import StreamingLoader
from phalanx.data.tokenizer import byte_tokenizer, train_bpe
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec
from tests.helpers.batches import batch_rows

SEQUENCE, ROWS, SEED = 37, 6, 4
TOKENIZER = byte_tokenizer()


def streaming_data_spec(corpus, **options):
    return DataSpec(train=[str(corpus)], streaming=True, held_out_fraction=0.2, **options)


def make_streaming_loader(corpus, rank=0, ranks=1, **options):
    return StreamingLoader(streaming_data_spec(corpus, **options), TOKENIZER, SEQUENCE, ROWS, SEED, rank, ranks)


def reference_rows(corpus, epochs):
    """Return rows of (tokens, targets, starts), computed from the text file by file and token by token."""
    rows = []
    files = list_source_files([str(corpus)])
    for epoch in range(epochs):
        stream = []
        for number in np.random.Generator(np.random.PCG64([SEED, epoch])).permutation(len(files)):
            for document in read_documents(files[number]):
                if document.text and not is_held_out(document.name, 0.2):
                    ids = [*document.text.encode(), TOKENIZER.end]
                    stream += [(token, offset) for offset, token in enumerate(ids)]
        for first in range(0, len(stream) - SEQUENCE, SEQUENCE):
            row = stream[first : first + SEQUENCE + 1]
            ids = [token for token, _ in row]
            rows.append(
                (ids[:-1], ids[1:], [position - min(offset, position) for position, (_, offset) in enumerate(row[:-1])])
            )
    return rows


@pytest.fixture
def lines(tmp_path):
    """Documents of a line each in three files, and one file that is a single document."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for name in "abc":
        rows = [json.dumps({"text": f"{name}{number} " * (number % 9)}) for number in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "d.txt").write_text("plain text " * 50)
    return folder


@pytest.mark.parametrize("kind", ["corpus", "lines"])
def test_streaming_loader_batches_match_reference_over_epochs(request, kind):
    folder = request.getfixturevalue(kind)
    loader, expected = make_streaming_loader(folder), reference_rows(folder, epochs=3)
    per_epoch = len(expected) // 3
    assert per_epoch > ROWS
    for step in range(len(expected) // ROWS):
        assert batch_rows(loader.step(step)) == expected[step * ROWS : (step + 1) * ROWS]
    assert loader.state(step + 1)["epoch"] in (2, 3)


@pytest.mark.parametrize("kind", ["corpus", "lines"])
def test_streaming_loader_resumes_exactly_from_every_state(request, kind):
    folder = request.getfixturevalue(kind)
    loader = make_streaming_loader(folder)
    states, batches = [], []
    # The number of steps of an epoch depends on the folder's name, by which documents are held out.
    while len(states) < 25 or states[-1]["epoch"] == 0:
        states.append(json.loads(json.dumps(loader.state(len(states)))))
        batches.append(batch_rows(loader.step(len(batches))))
    assert states[3]["tokens"] == 3 * ROWS * SEQUENCE
    for step, state in enumerate(states):
        resumed = make_streaming_loader(folder)
        resumed.resume(state)
        assert resumed.state(step) == state
        expected = batches[step : step + 3]
        assert [batch_rows(resumed.step(n)) for n in range(step, step + len(expected))] == expected


def test_streaming_loader_resume_skips_files_already_read(corpus, monkeypatch):
    loader = make_streaming_loader(corpus)
    for step in range(4):
        loader.step(step)
    state = loader.state(4)
    opened = []
    monkeypatch.setattr(
        "phalanx.data.streaming_loader.read_records",
        lambda part, key, first: opened.append(part) or read_records(part, key, first=first),
    )
    resumed = make_streaming_loader(corpus)
    resumed.resume(state)
    resumed.step(4)
    order = np.random.Generator(np.random.PCG64([SEED, state["epoch"]])).permutation(
        len(list_source_files([str(corpus)]))
    )
    files = list_source_files([str(corpus)])
    assert state["part"] > 0
    assert opened[0] == files[order[state["part"]]]
    assert not {files[number] for number in order[: state["part"]]} & set(opened)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_streaming_loader_global_batch_is_independent_of_rank_count(lines, ranks):
    reference = make_streaming_loader(lines)
    shares = [make_streaming_loader(lines, rank, ranks) for rank in range(ranks)]
    for step in range(8):
        assert list(chain(*(batch_rows(share.step(step)) for share in shares))) == batch_rows(reference.step(step))
        assert all(share.state(step + 1) == reference.state(step + 1) for share in shares)


def test_streaming_loader_excludes_held_out_documents(corpus):
    names = [document.name for document in documents([str(corpus)])]
    assert 0 < sum(is_held_out(name, 0.2) for name in names) < 20
    marks = {name: f"function_{int(name[-5:-3])}(" for name in names}
    loader = make_streaming_loader(corpus)
    text = "".join(TOKENIZER.decode(row) for step in range(20) for row in loader.step(step).tokens)
    assert {name for name in names if marks[name] in text} <= {name for name in names if not is_held_out(name, 0.2)}
    unsplit = make_streaming_loader(corpus, held_out=["elsewhere.txt"])
    text = "".join(TOKENIZER.decode(row) for step in range(60) for row in unsplit.step(step).tokens)
    assert sum(mark in text for mark in marks.values()) > sum(not is_held_out(name, 0.2) for name in names)


def test_streaming_loader_omits_document_starts_without_masking(corpus):
    assert make_streaming_loader(corpus).step(0).document_starts is not None
    assert make_streaming_loader(corpus, mask_documents=False).step(0).document_starts is None


def test_streaming_loader_rejects_repeated_step_and_unknown_state(corpus):
    loader = make_streaming_loader(corpus)
    loader.step(0)
    with pytest.raises(ValueError, match="only return its next step, 1"):
        loader.step(0)
    with pytest.raises(ValueError, match=r"saved steps: \[0, 1\]"):
        loader.state(2)


def test_streaming_loader_skip_steps_equals_consuming_steps(corpus):
    consuming = make_streaming_loader(corpus)
    batches = [consuming.step(number) for number in range(8)]
    skipping = make_streaming_loader(corpus)
    skipping.step(0)
    skipping.skip_steps(3)
    assert batch_rows(skipping.step(1)) == batch_rows(batches[4])
    assert {**skipping.state(2), "step": 5} == consuming.state(5)
    resumed = make_streaming_loader(corpus)
    resumed.resume(skipping.state(2))
    assert batch_rows(resumed.step(2)) == batch_rows(batches[5])


def test_streaming_loader_state_of_consumed_step_is_unaffected_by_prefetch(corpus):
    loader, without_prefetch = make_streaming_loader(corpus), make_streaming_loader(corpus)
    for step, _ in enumerate(prefetch(loader, 0, 12, depth=4)):
        without_prefetch.step(step)
        assert loader.state(step + 1) == without_prefetch.state(step + 1)


def test_streaming_loader_rejects_text_shorter_than_one_sequence(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    data = DataSpec(train=[str(tmp_path / "a.txt")], held_out=["elsewhere.txt"])
    with pytest.raises(UserError, match="has 6 tokens, but a sequence with its target needs 38"):
        StreamingLoader(data, TOKENIZER, SEQUENCE, ROWS, SEED).step(0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 9}, "training.seed"),
        ({"sequence": 9}, "training.seq_len"),
        ({"text": "new"}, "data"),
        ({"tokenizer": 1}, "data"),
        ({"fraction": 0.3}, "data"),
    ],
)
def test_streaming_loader_rejects_checkpoint_of_other_data_or_settings(corpus, change, field):
    state = make_streaming_loader(corpus).state(0)
    if "text" in change:
        (corpus / "new.py").write_text(change["text"])
    data = DataSpec(train=[str(corpus)], streaming=True, held_out_fraction=change.get("fraction", 0.2))
    tokenizer = train_bpe(["some text"], 300) if "tokenizer" in change else TOKENIZER
    other = StreamingLoader(data, tokenizer, change.get("sequence", SEQUENCE), ROWS, change.get("seed", SEED))
    with pytest.raises(UserError, match="differs from the checkpoint's ") as caught:
        other.resume(state)
    assert caught.value.field == field


def test_streaming_loader_rejects_checkpoint_of_older_document_names(corpus):
    loader = make_streaming_loader(corpus)
    state = loader.state(0)
    del state["recipe"]
    with pytest.raises(UserError, match="by the version of Phalanx that wrote the checkpoint") as caught:
        loader.resume(state)
    assert caught.value.fix == "resume with that version, or start a new run"
