"""Long texts in chunks, the order of documents in several threads, and errors of full disks."""

import errno
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data import indexed_dataset, tokenize
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.sources import Document
from phalanx.data.tokenize import TokenizationCounts, disk_error, split_text, tokenize_documents, write_indexed_pairs
from phalanx.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=20)


@given(text=st.text(alphabet="ab \n", max_size=200), size=st.integers(1, 40))
def test_split_text_chunks_join_to_text_within_size_limit(text, size):
    pieces = split_text(text, size)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces[:-1])
    for piece in pieces[:-1]:
        assert piece.endswith("\n") or "\n" not in piece, "the text was not cut at a line end"


def test_split_text_prefers_line_ends_then_spaces():
    assert split_text("one\ntwo\nthree", 9) == ["one\ntwo\n", "three"]
    assert split_text("one two three", 9) == ["one two", " three"]
    assert split_text("0123456789", 4) == ["0123", "4567", "89"]


@given(texts=texts, chunk=st.integers(1, 60))
def test_tokenize_documents_preserves_document_order(texts, chunk):
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    tokenized = list(tokenize_documents(documents, byte_tokenizer(), chunk))
    assert [document for document, _ in tokenized] == documents
    assert [byte_tokenizer().decode(ids) for _, ids in tokenized] == texts


def test_tokenize_documents_joins_chunks_of_long_document():
    text = "line of a long text\n" * 120_000
    tokenizer = train_bpe([text], 300)
    ((_, ids),) = tokenize_documents([Document("long", text)], tokenizer)
    assert len(split_text(text)) == 3
    assert tokenizer.decode(ids) == text


def test_tokenize_documents_propagates_reader_errors():
    def broken():
        yield Document("a", "text")
        raise RuntimeError("unreadable")

    with pytest.raises(RuntimeError, match="unreadable"):
        list(tokenize_documents(broken(), byte_tokenizer()))


@dataclass(frozen=True)
class BlockingTokenizer(Tokenizer):
    """A tokenizer that blocks at the text "wait" until it may continue."""

    may_continue: threading.Event = field(default_factory=threading.Event)

    def encode_batch(self, texts):
        if "wait" in texts:
            self.may_continue.wait(60)
        return super().encode_batch(texts)


def test_tokenize_documents_close_does_not_block_on_worker_threads():
    """The garbage collector may close the stream while a thread is being started, and a worker may need that lock to
    end."""
    tokenizer = BlockingTokenizer(vocab=257, end=256)
    stream = tokenize_documents([Document("a", "first"), Document("b", "wait")], tokenizer, chunk=1)
    assert next(stream)[0].name == "a"
    closing = threading.Thread(target=stream.close, daemon=True)
    closing.start()
    closing.join(20)
    tokenizer.may_continue.set()
    assert not closing.is_alive()


@pytest.mark.parametrize("end", [True, False])
def test_write_indexed_pairs_routes_documents_and_counts_tokens(tmp_path, end):
    documents = [Document(str(i), text) for i, text in enumerate(["even", "odd", "é", "three"])]
    seen = []
    counts = write_indexed_pairs(
        documents,
        byte_tokenizer(),
        [tmp_path / "even", tmp_path / "odd"],
        lambda document: int(document.name) % 2,
        end,
        seen.append,
    )
    assert counts == [TokenizationCounts(2, 6 + 2 * end, 6), TokenizationCounts(2, 8 + 2 * end, 8)]
    assert seen[-1] == TokenizationCounts(4, 14 + 4 * end, 14)
    assert [count.documents for count in seen] == [1, 2, 3, 4]
    odd = IndexedDataset(tmp_path / "odd")
    assert odd.document(0).tolist() == [*b"odd"] + [256] * end
    assert odd.tokens.dtype == np.uint16


def test_write_indexed_pairs_removes_files_on_failure(tmp_path):
    def broken():
        yield Document("a", "text")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_indexed_pairs(broken(), byte_tokenizer(), [tmp_path / "a", tmp_path / "b"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["write_index", "write_pair_metadata"])
@pytest.mark.parametrize("exists", [False, True])
def test_write_indexed_pairs_changes_nothing_when_last_file_fails(tmp_path, monkeypatch, failing, exists):
    prefixes = [tmp_path / "a", tmp_path / "b"]
    if exists:
        write_indexed_pairs([Document("1", "before")], byte_tokenizer(), prefixes)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    module = indexed_dataset if failing == "write_index" else tokenize
    write = getattr(module, failing)

    def fail(path, *rest):
        if Path(path).name.startswith("a"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *rest)

    monkeypatch.setattr(module, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        write_indexed_pairs([Document("1", "text")], byte_tokenizer(), prefixes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "is on a full disk"),
        (errno.EDQUOT, "is on a full disk"),
        (errno.EACCES, "is not writable"),
        (errno.EROFS, "is not writable"),
        (errno.ENAMETOOLONG, "cannot be used: File name too long"),
    ],
)
def test_disk_error_message_matches_errno(code, message):
    error = disk_error("data.cache", "/cache", OSError(code, os.strerror(code)))
    assert (error.field, error.value) == ("data.cache", "/cache")
    assert message in error.problem
    assert error.fix
