"""From a DataSpec to token files: the split, the cache, and all errors before any work."""

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phalanx.data import prepare as prepare_module
from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter
from phalanx.data.loader import TokenLoader
from phalanx.data.pair_metadata import write_pair_metadata
from phalanx.data.prepare import prepare
from phalanx.data.source_checks import check_sources, describe_unchecked_pairs
from phalanx.data.sources import documents, is_held_out
from phalanx.data.tokenize import TokenizationCounts
from phalanx.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec
from tests.helpers.indexed_pairs import write_indexed_pair


def decode_documents(prefix, tokenizer):
    dataset = IndexedDataset(prefix)
    tok = load_tokenizer(tokenizer)
    for number in range(len(dataset)):
        assert dataset.document(number)[-1] == tok.end
    return [tok.decode(dataset.document(number)) for number in range(len(dataset))]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "file"])
def test_prepare_holds_out_documents_by_name(make_data_spec, corpus, tmp_path, tokenizer):
    if tokenizer == "file":
        tokenizer = str(tmp_path / "tokenizer.json")
        train_bpe(["def function(x):\n"] * 50, 300).save(tokenizer)
    prepared = prepare(make_data_spec(tokenizer=tokenizer, tokenizer_vocab=300))
    all_documents = list(documents([str(corpus)]))
    held_out = [document.text for document in all_documents if is_held_out(document.name, 0.2)]
    assert 0 < len(held_out) < 20
    assert decode_documents(prepared.held_out, prepared.tokenizer) == held_out
    train = [document.text for document in all_documents if not is_held_out(document.name, 0.2)]
    assert decode_documents(prepared.train, prepared.tokenizer) == train


def test_prepare_uses_separate_held_out_sources(make_data_spec, corpus):
    prepared = prepare(make_data_spec(train=[str(corpus / "part0")], held_out=[str(corpus / "part1")]))
    assert len(IndexedDataset(prepared.train)) == len(IndexedDataset(prepared.held_out)) == 20


def test_prepare_trains_tokenizer_without_held_out_text(tmp_path):
    rows = [
        {"text": "seen seen "} if not is_held_out(f"a.jsonl:{n}", 0.5) else {"text": "hidden hidden "}
        for n in range(1, 50)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataSpec(train=[f"{tmp_path}/a.jsonl"], held_out_fraction=0.5, tokenizer_vocab=300, cache=f"{tmp_path}/c")
    vocabulary = Path(prepare(data).tokenizer).read_text()
    assert "seen" in vocabulary
    assert "hidden" not in vocabulary


@pytest.mark.parametrize("by_name", [True, False])
def test_prepare_holds_out_tail_of_single_document(make_data_spec, tmp_path, monkeypatch, by_name):
    text = "".join(f"line {number}\n" for number in range(1000))
    name = next(name for name in map("{}.txt".format, range(100)) if is_held_out(name, 0.05) == by_name)
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for tokenizer in ("bytes", "bpe"):
        prepared = prepare(make_data_spec(train=[name], held_out_fraction=0.05, tokenizer=tokenizer))
        tok = load_tokenizer(prepared.tokenizer)
        train, held_out = (IndexedDataset(prefix) for prefix in (prepared.train, prepared.held_out))
        assert tok.decode(train.document(0)) + tok.decode(held_out.document(0)) == text
        assert held_out.size / (train.size + held_out.size) == pytest.approx(0.05, abs=0.001)


def test_prepare_uses_indexed_pair_in_place_and_holds_out_its_tail(make_data_spec, tmp_path):
    prefix = write_indexed_pair(tmp_path / "tokens", [[n % 256] * 10 for n in range(100)])
    prepared = prepare(make_data_spec(train=[prefix]))
    train, held_out = (IndexedDataset(prefix) for prefix in (prepared.train, prepared.held_out))
    assert (len(train), len(held_out)) == (80, 20)
    assert held_out.document(0).tolist() == [80] * 10
    assert os.path.samefile(f"{prepared.train}.bin", f"{prefix}.bin")
    both = prepare(make_data_spec(train=[prefix], held_out=[write_indexed_pair(tmp_path / "other", [[1, 2, 3]])]))
    assert (both.train, both.held_out) == (prefix, str(tmp_path / "other"))


def test_prepare_tokenizes_held_out_text_for_indexed_pair(make_data_spec, tmp_path, corpus):
    prefix = write_indexed_pair(tmp_path / "tokens", [[1, 2, 3]])
    prepared = prepare(make_data_spec(train=[f"{prefix}.bin"], held_out=[str(corpus)]))
    assert prepared.train == prefix
    assert len(IndexedDataset(prepared.held_out)) == 40


@pytest.mark.parametrize("vocab", [257, 70_000])
def test_prepare_joins_indexed_pairs_without_copying_tokens(make_data_spec, tmp_path, vocab):
    first = write_indexed_pair(tmp_path / "first", [[n % 256] * 10 for n in range(100)])
    second = write_indexed_pair(tmp_path / "second", [[n] * 5 for n in range(100)], vocab)
    prepared = prepare(make_data_spec(train=[first, second]))
    train, held_out = (IndexedDataset(prefix) for prefix in (prepared.train, prepared.held_out))
    expected_train = [[n % 256] * 10 for n in range(80)] + [[n] * 5 for n in range(80)]
    expected_held_out = [[n % 256] * 10 for n in range(80, 100)] + [[n] * 5 for n in range(80, 100)]
    for dataset, expected in ((train, expected_train), (held_out, expected_held_out)):
        assert [dataset.document(number).tolist() for number in range(len(dataset))] == expected
        copy = IndexedDataset(write_indexed_pair(tmp_path / "copy", expected, vocab))
        assert dataset.fingerprint() == copy.fingerprint()
    assert not list(Path(prepared.train).parent.glob("train.bin"))
    other = write_indexed_pair(tmp_path / "other", [[1, 2, 3]])
    write_pair_metadata(first, byte_tokenizer())
    for pattern in ("[fs]*.bin", "[fs]*"):
        separate = prepare(make_data_spec(train=[f"{tmp_path}/{pattern}"], held_out=[other, other]))
        assert IndexedDataset(separate.train).size == 1500
        assert IndexedDataset(separate.held_out).size == 6


@pytest.mark.parametrize(
    "names", [["a.bin", "a.idx"], ["a", "./a.bin"], ["[a].bin", "[a].idx"], ["a", "*"]], ids=",".join
)
def test_prepare_takes_pair_of_several_sources_once(make_data_spec, tmp_path, monkeypatch, names):
    (tmp_path / "pairs").mkdir()
    monkeypatch.chdir(tmp_path / "pairs")
    write_indexed_pair("a", [[1, 2, 3]])
    other = write_indexed_pair(tmp_path / "other", [[1]])
    assert IndexedDataset(prepare(make_data_spec(train=names, held_out=[other])).train).size == 3
    assert IndexedDataset(prepare(make_data_spec(train=["a", "a"], held_out=[other])).train).size == 6  # as asked for


def test_prepare_accepts_prepared_pairs_as_sources(make_data_spec, tmp_path):
    pairs = [write_indexed_pair(tmp_path / name, [[n] * 10 for n in range(50)]) for name in ("first", "second")]
    for sources in (pairs[:1], pairs):
        prepared = prepare(make_data_spec(train=sources))
        repeated = prepare(make_data_spec(train=[prepared.train], held_out=[prepared.held_out]))
        assert (repeated.train, repeated.held_out) == (prepared.train, prepared.held_out)
        third = write_indexed_pair(tmp_path / "third", [[7] * 10])
        joined = prepare(make_data_spec(train=[prepared.held_out, third]))
        assert IndexedDataset(joined.train).size == round(0.8 * 100 * len(sources)) + 8
        assert IndexedDataset(joined.train).document(0).tolist() == [40] * 10


def test_token_loader_gives_equal_batches_of_joined_and_copied_pairs(make_data_spec, tmp_path):
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 256, size).tolist() for size in generator.integers(1, 40, 60)]
    pairs = [write_indexed_pair(tmp_path / f"part{n}", texts[n * 20 : n * 20 + 20]) for n in range(3)]
    prepared = prepare(make_data_spec(train=pairs, held_out=[write_indexed_pair(tmp_path / "other", [[1]])]))
    joined = TokenLoader(IndexedDataset(prepared.train), 16, 8, seed=1)
    copied = TokenLoader(IndexedDataset(write_indexed_pair(tmp_path / "copy", texts)), 16, 8, seed=1)
    copied.resume(joined.state(0))
    for step in range(12):
        assert np.array_equal(joined.step(step).tokens, copied.step(step).tokens)
        assert np.array_equal(joined.step(step).targets, copied.step(step).targets)


def test_prepare_is_independent_of_location_and_spelling_of_sources(make_data_spec, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, tmp_path / "elsewhere" / "moved")
    (tmp_path / "inner").mkdir()
    expected = prepare(make_data_spec(tokenizer="bpe", tokenizer_vocab=300))
    relative = os.path.relpath(corpus)
    for cache, source in {"a": relative, "b": f"inner/../{relative}", "c": "elsewhere/moved"}.items():
        prepared = prepare(make_data_spec(train=[source], tokenizer="bpe", tokenizer_vocab=300, cache=cache))
        assert Path(prepared.tokenizer).read_text() == Path(expected.tokenizer).read_text()
        for name in ("train", "held_out"):
            tokens, expected_tokens = (IndexedDataset(getattr(data, name)) for data in (prepared, expected))
            assert tokens.fingerprint() == expected_tokens.fingerprint()
    assert prepare(make_data_spec(train=[relative], tokenizer="bpe", tokenizer_vocab=300)) == expected


@pytest.mark.parametrize("made_of", ["pair", "two pairs", "two pairs as train and held out", "one document"])
def test_prepared_pairs_are_known_to_be_of_their_tokenizer(make_data_spec, pair_of_text, tmp_path, made_of):
    pair, own = pair_of_text
    (tmp_path / "one.txt").write_text("one document\n" * 99)
    sources = {
        "pair": {"train": [pair]},
        "two pairs": {"train": [pair, pair]},
        "two pairs as train and held out": {"train": [pair, pair], "held_out": [str(tmp_path / "copy")] * 2},
        "one document": {"train": [str(tmp_path / "one.txt")]},
    }[made_of]
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(f"{pair}{suffix}", tmp_path / f"copy{suffix}")
    prepared = prepare(make_data_spec(**sources, tokenizer=own))
    sources_again = {"train": [prepared.train], "held_out": [prepared.held_out]}
    assert describe_unchecked_pairs(make_data_spec(**sources_again, tokenizer=own)) is None
    train_bpe(["return value + other"] * 50, load_tokenizer(own).vocab).save(tmp_path / "other.json")
    with pytest.raises(UserError, match="was tokenized with another tokenizer"):
        check_sources(make_data_spec(**sources_again, tokenizer=str(tmp_path / "other.json")))


def test_prepared_pairs_of_unknown_tokenizer_stay_unknown(make_data_spec, pair_of_text, tmp_path):
    pair, own = pair_of_text
    prepared = prepare(make_data_spec(train=[pair, write_indexed_pair(tmp_path / "unknown", [[1] * 9])], tokenizer=own))
    data = make_data_spec(train=[prepared.train], held_out=[prepared.held_out], tokenizer=own)
    assert f"{prepared.train} and 1 more" in describe_unchecked_pairs(data)


def test_prepare_with_streaming_writes_only_held_out_data(make_data_spec, corpus, monkeypatch):
    prepared = prepare(make_data_spec(streaming=True))
    assert prepared.train == ""
    held_out = [document.text for document in documents([str(corpus)]) if is_held_out(document.name, 0.2)]
    assert decode_documents(prepared.held_out, prepared.tokenizer) == held_out
    monkeypatch.setattr(prepare_module, "STREAMING_HELD_OUT_DOCUMENTS", 3)
    first = prepare(make_data_spec(streaming=True, held_out_fraction=0.21))
    assert len(IndexedDataset(first.held_out)) == 3


def test_prepare_reuses_cache_on_second_call(make_data_spec, monkeypatch):
    first = prepare(make_data_spec())
    monkeypatch.setattr(prepare_module, "write_indexed_pairs", None)
    monkeypatch.setattr(prepare_module, "train_bpe", None)
    assert prepare(make_data_spec()) == first
    assert prepare(make_data_spec(mask_documents=False)) == first


def test_prepare_cache_key_depends_on_everything_that_affects_tokens(make_data_spec, corpus, tmp_path):
    (tmp_path / "t.json").write_text(train_bpe(["ab"], 300).to_json())
    prefixes = [
        prepare(make_data_spec(**options)).held_out
        for options in (
            {},
            {"held_out_fraction": 0.3},
            {"tokenizer": "bpe"},
            {"tokenizer": "bpe", "tokenizer_vocab": 300},
            {"tokenizer": str(tmp_path / "t.json")},
            {"train": [str(corpus / "part0")]},
        )
    ]
    (tmp_path / "t.json").write_text(train_bpe(["abcd" * 9], 300).to_json())
    prefixes.append(prepare(make_data_spec(tokenizer=str(tmp_path / "t.json"))).held_out)
    os.utime(corpus / "part0" / "file00.py", ns=(1, 1))
    prefixes.append(prepare(make_data_spec()).held_out)
    (corpus / "part0" / "file00.py").write_text("other\n")
    prefixes.append(prepare(make_data_spec()).held_out)
    assert len(set(prefixes)) == len(prefixes)


def test_prepare_reports_progress_counts(make_data_spec):
    seen: list[TokenizationCounts] = []
    prepare(make_data_spec(), progress=seen.append)
    assert seen[-1].documents == 40
    assert seen[-1].tokens == seen[-1].text_bytes + 40


def test_prepare_leaves_cache_empty_on_failure(make_data_spec, corpus, tmp_path):
    (corpus / "z.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    with pytest.raises(UserError, match="is not valid JSON"):
        prepare(make_data_spec())
    assert list((tmp_path / "cache").iterdir()) == []


def test_prepare_rewrites_deleted_cache_entry(make_data_spec, tmp_path):
    first = prepare(make_data_spec())
    Path(first.train).with_name(prepare_module.COMPLETE_FILE).unlink()
    shutil.rmtree(Path(first.train).parent)
    assert prepare(make_data_spec()) == first
    assert len(IndexedDataset(first.train)) > 0


def prepare_after_barrier(data, barrier, results):
    barrier.wait()
    results.put(prepare(data))


def test_prepare_concurrent_runs_share_one_cache_entry(make_data_spec):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    data = make_data_spec(tokenizer="bpe", tokenizer_vocab=300)
    runs = [context.Process(target=prepare_after_barrier, args=(data, barrier, results)) for _ in range(2)]
    for run in runs:
        run.start()
    prepared = [results.get(timeout=60) for _ in runs]
    for run in runs:
        run.join()
    assert prepared[0] == prepared[1] == prepare(data)
    assert [run.exitcode for run in runs] == [0, 0]
    assert [path.name for path in Path(data.cache).iterdir()] == [Path(prepared[0].train).parent.name]


def test_prepare_uses_cache_entry_finished_by_concurrent_run(make_data_spec, monkeypatch):
    """The other run finishes while this one writes."""
    write = prepare_module._write_cache_folder

    def write_after_other_run(data, *arguments):
        write(data, *arguments)
        monkeypatch.setattr(prepare_module, "_write_cache_folder", write)
        prepare(data)

    monkeypatch.setattr(prepare_module, "_write_cache_folder", write_after_other_run)
    prepared = prepare(make_data_spec())
    assert len(list(Path(make_data_spec().cache).iterdir())) == 1
    assert len(IndexedDataset(prepared.train)) > 0


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "is on a full disk"), (errno.EROFS, "is not writable")])
def test_prepare_reports_unwritable_cache(make_data_spec, monkeypatch, code, message):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(IndexedWriter, "add", fail)
    with pytest.raises(UserError, match=message) as caught:
        prepare(make_data_spec())
    assert caught.value.field == "data.cache"
    assert list(Path(make_data_spec().cache).iterdir()) == []


def test_prepare_rejects_cache_path_under_a_file(make_data_spec, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used: Not a directory") as caught:
        prepare(make_data_spec(cache=str(tmp_path / "file" / "cache")))
    assert caught.value.field == "data.cache"


def write_invalid_sources(folder):
    (folder / "empty").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "text.txt").write_text("text")
    (folder / "rows.jsonl").write_text('{"content": "text"}\n')
    write_indexed_pair(folder / "good", [[1, 2, 3]])
    write_indexed_pair(folder / "large", [[300]], vocab=70_000)
    write_indexed_pair(folder / "short", [[1, 2, 3]])
    os.truncate(folder / "short.bin", 2)
    (folder / "lone.idx").write_bytes((folder / "good.idx").read_bytes())


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"train": ["missing.txt"]}, "data.train", "does not exist"),
        ({"train": []}, "data.train", "is empty"),
        ({"train": ["empty"]}, "data.train", "is a directory without a readable file"),
        ({"train": ["empty.txt"]}, "data.train", "has no text"),
        ({"train": ["rows.jsonl"]}, "data.text_key", "is not a field of rows.jsonl:1"),
        ({"held_out": ["missing.txt"]}, "data.held_out", "does not exist"),
        ({"held_out": ["text.txt"]}, "data.held_out", "is also in data.train"),
        ({"tokenizer": "missing.json"}, "data.tokenizer", "does not exist"),
        ({"tokenizer": "text.txt"}, "data.tokenizer", "is not valid JSON"),
        ({"train": ["short"]}, "data.train", "is truncated: it has 2 bytes, but its index needs 6"),
        ({"train": ["lone"]}, "data.train", "has no .bin file"),
        ({"train": ["lone.bin"]}, "data.train", "has no .bin file"),
        ({"train": ["good", "text.txt"]}, "data.train", "contains both .bin/.idx pairs and text"),
        (
            {"train": ["good"], "tokenizer": "bpe"},
            "data.tokenizer",
            "cannot be trained, because data.* contains tokens",
        ),
        (
            {"held_out": ["good"], "tokenizer": "bpe"},
            "data.tokenizer",
            "cannot be trained, because data.* contains tokens",
        ),
        ({"train": ["good", "large"]}, "data.train", "has token id 300, but the tokenizer only has ids 0 to 256"),
        ({"held_out": ["large"]}, "data.held_out", "has token id 300"),
        ({"train": ["good"], "held_out": ["good.bin"]}, "data.held_out", "is also in data.train"),
        ({"train": ["g*.bin", "s*.idx"]}, "data.train", "is truncated: it has 2 bytes"),
        ({"train": ["[gt]*"]}, "data.train", "contains both .bin/.idx pairs and text"),
        ({"train": ["lone.*"]}, "data.train", "has no text"),
        ({"train": ["good"], "streaming": True}, "data.streaming", "which is already tokenized"),
    ],
)
def test_prepare_and_check_sources_reject_invalid_data_before_writing(
    make_data_spec, tmp_path, monkeypatch, options, field, message
):
    write_invalid_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    data = make_data_spec(**{"train": ["text.txt"]} | options)
    for function in (check_sources, prepare):
        with pytest.raises(UserError, match=message) as caught:
            function(data)
        assert caught.value.field == field
        assert caught.value.fix
    assert not Path(data.cache).exists()


def test_prepare_rejects_streaming_data_too_small_to_hold_out(make_data_spec, tmp_path):
    (tmp_path / "one.txt").write_text("text")
    with pytest.raises(UserError, match=r"is not set, and data\.train has too few documents") as caught:
        prepare(make_data_spec(train=[str(tmp_path / "one.txt")], streaming=True, held_out_fraction=0.0001))
    assert caught.value.fix == "set data.held_out"


def test_data_package_import_does_not_load_torch_or_tokenizers():
    program = (
        "import sys, pkgutil, importlib, phalanx.data as room\n"
        "for module in pkgutil.iter_modules(room.__path__): importlib.import_module(f'phalanx.data.{module.name}')\n"
        "print([name for name in ('torch', 'tokenizers', 'pyarrow', 'datasets') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def write_notes(folder):
    rows = [json.dumps({"content": f"note {number} says hello\n" * 3}) for number in range(60)]
    (folder / "notes.jsonl").write_text("\n".join(rows))
    return {"name": "notes", "path": f"{folder}/notes.jsonl", "weight": 1, "text_key": "content"}


@pytest.fixture
def make_mixture(corpus, tmp_path):
    """A DataSpec of two sources, of code and of records with a field of their own."""

    def build(notes=None, **options):
        code = {"name": "code", "path": str(corpus), "weight": 3}
        options = {"tokenizer": "bytes", "cache": str(tmp_path / "cache"), "held_out_fraction": 0.2} | options
        return DataSpec(source=[code, {**write_notes(tmp_path), **(notes or {})}], **options)

    return build


def documents_of(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(len(dataset))]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_prepare_mixture_equals_each_source_by_itself(make_mixture, make_data_spec, tmp_path, tokenizer):
    mixture = make_mixture(tokenizer=tokenizer, tokenizer_vocab=300)
    prepared = prepare(mixture)
    options = {"tokenizer": "bytes" if tokenizer == "bytes" else prepared.tokenizer, "tokenizer_vocab": 300}
    alone = [
        prepare(make_data_spec(train=source.path, text_key=source.text_key, **options)) for source in mixture.source
    ]
    assert prepared.train == ""
    assert prepared.sources == tuple(part.train for part in alone)
    assert documents_of(prepared.held_out) == [document for part in alone for document in documents_of(part.held_out)]
    entries = sorted((tmp_path / "cache").iterdir())
    assert prepare(mixture) == prepared
    assert sorted((tmp_path / "cache").iterdir()) == entries


def test_prepare_trains_tokenizer_on_all_sources(make_mixture):
    tokenizer = Path(prepare(make_mixture(tokenizer="bpe", tokenizer_vocab=400)).tokenizer).read_text()
    assert "hello" in tokenizer
    assert "def" in tokenizer


def test_prepare_mixture_holds_nothing_out_with_held_out_text(make_mixture, tmp_path):
    """The held-out text has the field of data.text_key, whatever the fields of sources."""
    (tmp_path / "held-out.jsonl").write_text('{"text": "held out"}\n{"text": "as well"}')
    prepared = prepare(make_mixture(held_out=[str(tmp_path / "held-out.jsonl")]))
    assert decode_documents(prepared.held_out, prepared.tokenizer) == ["held out", "as well"]
    assert [len(IndexedDataset(source)) for source in prepared.sources] == [40, 60]


def test_prepare_mixes_text_and_pairs(make_mixture, tmp_path):
    pair = write_indexed_pair(tmp_path / "pair", [[1, 2, 3, 256], [4, 5, 6, 256]])
    held_out = write_indexed_pair(tmp_path / "held-out", [[7, 8, 256]])
    prepared = prepare(make_mixture({"path": pair}, held_out=[held_out]))
    assert prepared.sources[1] == pair
    assert prepared.held_out == held_out
    assert len(IndexedDataset(prepared.sources[0])) == 40


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"path": "/nowhere"}, r"data.source\[1\].path = '/nowhere' does not exist"),
        ({"text_key": None}, r"data.source\[1\].text_key = 'text' is not a field .*\n  fix: .*'content'"),
        ({"text_key": "body"}, r"data.source\[1\].text_key = 'body' is not a field .*\n  fix: .*'content'"),
    ],
)
def test_prepare_names_source_in_errors(make_mixture, notes, message):
    with pytest.raises(UserError, match=message):
        prepare(make_mixture(notes))


def test_prepare_names_source_with_late_error(make_mixture, tmp_path):
    """A damaged line after the beginning is found when the text is tokenized."""
    (tmp_path / "late.jsonl").write_text('{"content": "a"}\n' * 9 + "{")
    with pytest.raises(UserError, match=r"data.source\[1\].path = '.*late.jsonl:10' is not valid JSON"):
        prepare(make_mixture({"path": str(tmp_path / "late.jsonl")}))


def test_prepare_refuses_pair_of_a_source_as_held_out(make_mixture, tmp_path):
    pair = write_indexed_pair(tmp_path / "pair", [[1, 2, 3, 256], [4, 5, 6, 256]])
    with pytest.raises(UserError, match=r"is also in data.source"):
        prepare(make_mixture({"path": pair}, held_out=[pair]))
