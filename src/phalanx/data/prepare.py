"""Token files for a DataSpec: train and held-out text, tokenized once and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path

from phalanx.data.bad_records import BAD_RECORDS_SUFFIX, BadRecord, BadRecords, read_bad_records, write_bad_records
from phalanx.data.indexed_dataset import IndexedDataset, join_pairs, split_tail
from phalanx.data.pair_metadata import read_pair_metadata, recorded_kind, write_pair_metadata
from phalanx.data.source_checks import (
    check_sources,
    data_of_set,
    errors_of_source,
    indexed_prefixes,
    list_files,
    parts_of_mixture,
    records_of,
    require_template,
    template_of,
)
from phalanx.data.sources import (
    RECIPE_VERSION,
    Document,
    documents,
    is_held_out,
    list_source_files,
    read_documents,
)
from phalanx.data.tokenize import Progress, disk_error, write_indexed_pairs
from phalanx.data.tokenizer import (
    Tokenizer,
    chat_template,
    load_tokenizer,
    tokenizer_without_training,
    train_bpe,
    with_chat_template,
)
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec

logger = logging.getLogger(__name__)

COMPLETE_FILE = "complete.json"
STREAMING_HELD_OUT_DOCUMENTS = 1000


@dataclass(frozen=True)
class PreparedData:
    """Files that training reads."""

    train: str
    """Prefix of the .bin/.idx pair to train on; "" if data.streaming, data.dataset or `sources` provide the tokens."""
    held_out: str
    """Prefix of the pair to evaluate on."""
    tokenizer: str
    """Path of the tokenizer.json."""
    sources: tuple[str, ...] = ()
    """Prefixes of the pairs of data.source, in order."""
    held_out_sources: tuple[str, ...] = ()
    """Prefixes of data.held_out_sets, or of the held-out parts of the sources, which `held_out` joins; none with
    data.held_out."""

    @property
    def bad_records(self) -> list[BadRecord]:
        """The broken records that were skipped when these files were written."""
        prefixes = filter(None, dict.fromkeys([self.train, *self.sources, self.held_out]))
        return [record for prefix in prefixes for record in read_bad_records(f"{prefix}{BAD_RECORDS_SUFFIX}")]


def prepare(data: DataSpec, progress: Progress | None = None) -> PreparedData:
    """Tokenize the text of `data`, unless the cache has it.

    The key of the cache consists of the paths, names, sizes and times of all files (only the name of a dataset on the
    hub), the tokenizer and the split. Each source of a mixture has an entry of its own. An entry is written to a
    temporary folder and renamed. If several runs write the same entry, the first wins.
    Raises UserError for errors of the sources, the tokenizer or the cache."""
    check_sources(data)
    whole = data
    if data.held_out_sets:
        whole = data.replace(held_out=_text_of_sets(data), held_out_sets={})
    prepared = _prepare_mixture(whole, progress) if data.source else _prepare_source(whole, "data.train", progress)
    if not data.held_out_sets:
        return prepared
    tokenizer = data.replace(tokenizer=prepared.tokenizer if data.tokenizer == "bpe" else data.tokenizer)
    sets = (_prepare_held_out_set(tokenizer, name, progress) for name in data.held_out_sets)
    return replace(prepared, held_out_sources=tuple(sets))


def _text_of_sets(data: DataSpec) -> list[str]:
    """Return the text of the held-out sets that have the format of `data`, which stands for all of them.

    Raises UserError if no set has."""
    sets = {name: text for name, text in data.held_out_sets.items() if data_of_set(data, name).format == data.format}
    if not sets:
        formats = sorted({data_of_set(data, name).format for name in data.held_out_sets})
        problem = f"have other formats ({', '.join(formats)}) than data.format = {data.format!r}"
        fix = f"set data.format = {json.dumps(formats[0])}, and format of the sources that have another"
        raise UserError("data.held_out_sets", list(data.held_out_sets), problem, fix)
    return [source for sources in sets.values() for source in sources]


def _prepare_held_out_set(data: DataSpec, name: str, progress: Progress | None) -> str:
    """Return the prefix of the tokens of a set of data.held_out_sets."""
    sources = data.held_out_sets[name]
    field = f"data.held_out_sets.{name}"
    like = data_of_set(data, name)
    data = data.replace(
        format=like.format,
        text_key=like.text_key,
        chat_template=template_of(like, like.format),
        source=[],
        train=sources,
    )
    pairs = indexed_prefixes(sources, field)
    if len(pairs) == 1:
        return pairs[0]

    def write_pair(folder: Path) -> None:
        _write_sources(data, sources, field, load_or_train_tokenizer(data, []), folder / "held_out", progress)

    alone = data.replace(train=sources, source=[], held_out=[], held_out_sets={})
    return str(_fill_cache(data, _hash_key(["held-out set", _cache_key(alone)]), write_pair) / "held_out")


def _prepare_source(data: DataSpec, field: str, progress: Progress | None) -> PreparedData:
    """Prepare `data.train`, which `field` of the run file names."""
    folder = _fill_cache(data, _cache_key(data), lambda folder: _write_cache_folder(data, folder, field, progress))
    # A pair of token files that the user provides is read in place, unless its end is held out.
    train_pairs = indexed_prefixes(data.train, field) if data.held_out else []
    held_out_pairs = indexed_prefixes(data.held_out, "data.held_out")
    train = train_pairs[0] if len(train_pairs) == 1 else str(folder / "train")
    held_out = held_out_pairs[0] if len(held_out_pairs) == 1 else str(folder / "held_out")
    return PreparedData(train if data.writes_train_tokens else "", held_out, str(folder / "tokenizer.json"))


def _prepare_mixture(data: DataSpec, progress: Progress | None) -> PreparedData:
    """Prepare each source by itself, with one tokenizer for all.

    Without data.held_out, the held-out part is that of each source, one after the other."""
    parts = parts_of_mixture(data)

    def write_common_files(folder: Path) -> None:
        tokenizer = load_or_train_tokenizer(data, parts)
        tokenizer.save(folder / "tokenizer.json")
        if data.held_out:
            _write_sources(data, data.held_out, "data.held_out", tokenizer, folder / "held_out", progress)

    held_out_text = []
    if data.held_out:
        template = template_of(data, data.format)
        held_out_text = [data.replace(train=data.held_out, chat_template=template, source=[], held_out=[])]
    key = _hash_key([_cache_key(part) for part in [*parts, *held_out_text]])
    folder = _fill_cache(data, key, write_common_files)
    tokenizer = str(folder / "tokenizer.json")
    held_out_pairs = indexed_prefixes(data.held_out, "data.held_out")
    held_out = held_out_pairs[0] if len(held_out_pairs) == 1 else str(folder / "held_out")
    changes = {
        "tokenizer": tokenizer if data.tokenizer == "bpe" else data.tokenizer,
        "held_out": [held_out] if data.held_out else [],
    }
    prepared = []
    for number, part in enumerate(parts):
        field = f"data.source[{number}].path"
        with errors_of_source(field):
            prepared.append(_prepare_source(part.replace(**changes), field, progress))
    sources = tuple(part.train for part in prepared)
    if data.held_out:
        return PreparedData("", held_out, tokenizer, sources)
    held_out_sources = tuple(part.held_out for part in prepared)
    return PreparedData("", _join_held_out(data, held_out_sources, tokenizer), tokenizer, sources, held_out_sources)


def _join_held_out(data: DataSpec, pairs: Sequence[str], tokenizer: str) -> str:
    """Return the prefix of the joined held-out parts of a mixture's sources."""

    def write_joined_pair(folder: Path) -> None:
        join_pairs([IndexedDataset(pair) for pair in pairs], folder / "held_out")
        _carry_metadata(pairs, load_tokenizer(tokenizer), folder / "held_out")

    return str(_fill_cache(data, _hash_key(pairs), write_joined_pair) / "held_out")


def _fill_cache(data: DataSpec, key: str, write: Callable[[Path], None]) -> Path:
    """Return the folder `key` of the cache. Unless it is there, `write` fills it under another name before."""
    cache = Path(data.cache).expanduser()
    final_folder = cache / key
    try:
        if (final_folder / COMPLETE_FILE).is_file():
            logger.debug("tokens are read from %s", final_folder)
            return final_folder
        cache.mkdir(parents=True, exist_ok=True)
        temp_folder = Path(tempfile.mkdtemp(prefix=f"{final_folder.name}.", suffix=".partial", dir=cache))
        try:
            write(temp_folder)
            (temp_folder / COMPLETE_FILE).write_text(data.model_dump_json(indent=1))
            try:
                temp_folder.rename(final_folder)
            except OSError:
                if not (final_folder / COMPLETE_FILE).is_file():
                    raise
        finally:
            shutil.rmtree(temp_folder, ignore_errors=True)
    except OSError as error:
        raise disk_error("data.cache", data.cache, error) from None
    return final_folder


def load_or_train_tokenizer(data: DataSpec, parts: Sequence[DataSpec]) -> Tokenizer:
    """Return the configured tokenizer, or train one on the text of all parts."""
    if (tokenizer := tokenizer_without_training(data)) is not None:
        return tokenizer
    return with_chat_template(train_bpe(_iterate_training_texts(parts), data.tokenizer_vocab), data)


def _iterate_training_texts(parts: Sequence[DataSpec]) -> Iterator[str]:
    """Yield the training text of all parts, files in the order of their hashes: its beginning is a random sample.

    If every document would be held out by its name, the end of the text is held out instead, and all documents are
    yielded."""
    source_files = [(file, number) for number, part in enumerate(parts) for file in list_source_files(part.train)]
    records = [records_of(part) for part in parts]
    source_files.sort(key=lambda item: hashlib.blake2b(item[0].name.encode("utf-8", "replace")).digest())

    def iter_texts(include_held_out: bool) -> Iterator[str]:
        bad_records = [BadRecords(part.max_bad_records) for part in parts]
        for file, part_number in source_files:
            part = parts[part_number]
            for document in read_documents(file, records[part_number], bad_records=bad_records[part_number]):
                if include_held_out or not _is_held_out(part, document):
                    yield document.text

    train_texts = iter_texts(include_held_out=False)
    first_text = next(train_texts, None)
    return iter_texts(include_held_out=True) if first_text is None else chain([first_text], train_texts)


def _is_held_out(data: DataSpec, document: Document) -> bool:
    return not data.held_out and is_held_out(document.name, data.held_out_fraction)


def _write_cache_folder(data: DataSpec, folder: Path, field: str, progress: Progress | None) -> None:
    """Fill a cache folder: tokenizer.json, and the pairs that are not the user's own."""
    tokenizer = load_or_train_tokenizer(data, [data])
    tokenizer.save(folder / "tokenizer.json")
    train = folder / "train"
    held_out = folder / "held_out"
    train_pairs = indexed_prefixes(data.train, field)
    if data.held_out:
        _write_sources(data, data.held_out, "data.held_out", tokenizer, held_out, progress)
        if data.writes_train_tokens:
            _write_sources(data, data.train, field, tokenizer, train, progress)
    elif train_pairs:
        _split_pairs(train_pairs, data.held_out_fraction, train, held_out)
        _carry_metadata(train_pairs, tokenizer, train, held_out)
    elif data.writes_train_tokens:
        _write_split(data, field, tokenizer, [train, held_out], progress)
    else:
        # Only the first held-out documents, because a stream may be endless.
        text = documents(data.train, records_of(data), field, BadRecords(data.max_bad_records))
        selected = (document for document in text if _is_held_out(data, document))
        first_selected = islice(selected, STREAMING_HELD_OUT_DOCUMENTS)
        (counts,) = write_indexed_pairs(first_selected, tokenizer, [held_out], kind=data.format, progress=progress)
        if not counts.documents:
            problem = "is not set, and data.train has too few documents to hold one out"
            raise UserError("data.held_out", None, problem, "set data.held_out")


def _write_sources(
    data: DataSpec, sources: list[str], field: str, tokenizer: Tokenizer, prefix: Path, progress: Progress | None
) -> None:
    """Write one pair from all sources of a field: from its text, or by joining its pairs. One pair is used in place."""
    pairs = indexed_prefixes(sources, field)
    if len(pairs) > 1:
        join_pairs([IndexedDataset(pair) for pair in pairs], prefix)
        _carry_metadata(pairs, tokenizer, prefix)
    elif not pairs:
        bad_records = BadRecords(data.max_bad_records)
        text = documents(sources, records_of(data), field, bad_records)
        write_indexed_pairs(text, tokenizer, [prefix], kind=data.format, progress=progress)
        write_bad_records(f"{prefix}{BAD_RECORDS_SUFFIX}", bad_records.list)


def _split_pairs(prefixes: Sequence[str], fraction: float, train: Path, held_out: Path) -> None:
    """Hold out the end of each pair."""
    if len(prefixes) == 1:
        _split_tail(prefixes[0], fraction, train, held_out)
        return
    split_prefixes = [(f"{train}-{number}", f"{held_out}-{number}") for number in range(len(prefixes))]
    for prefix, (head, tail) in zip(prefixes, split_prefixes, strict=True):
        _split_tail(prefix, fraction, head, tail)
    join_pairs([IndexedDataset(head) for head, _ in split_prefixes], train)
    join_pairs([IndexedDataset(tail) for _, tail in split_prefixes], held_out)


def _split_tail(prefix: str | Path, fraction: float, head: str | Path, tail: str | Path) -> None:
    dataset = IndexedDataset(prefix)
    unit = {"text": 0, "chat": 1, "prompt": 1, "preference": 2}[recorded_kind(dataset)]
    split_tail(dataset, fraction, head, tail, unit)


def _carry_metadata(sources: Sequence[str], tokenizer: Tokenizer, *prefixes: Path) -> None:
    """Write the tokenizer next to derived pairs if all sources record it, which `check_sources` compared."""
    datasets = [IndexedDataset(source) for source in sources]
    kinds = {recorded_kind(dataset) for dataset in datasets}
    kind = next(iter(kinds)) if len(kinds) == 1 else "chat"
    if all(map(read_pair_metadata, datasets)):
        for prefix in prefixes:
            write_pair_metadata(prefix, tokenizer, kind)


def _write_split(
    data: DataSpec, field: str, tokenizer: Tokenizer, prefixes: list[Path], progress: Progress | None
) -> None:
    """Hold documents out by name; if that selects none or all, hold out the end of the text."""

    def pair_of(document: Document) -> int:
        return int(_is_held_out(data, document))

    bad_records = BadRecords(data.max_bad_records)
    text = documents(data.train, records_of(data), field, bad_records)
    counts = write_indexed_pairs(text, tokenizer, prefixes, pair_of, kind=data.format, progress=progress)
    write_bad_records(f"{prefixes[0]}{BAD_RECORDS_SUFFIX}", bad_records.list)
    if not all(count.documents for count in counts):
        for prefix in prefixes:
            Path(f"{prefix}.bin").unlink()
        everything = prefixes[0].parent / "all"
        bad_records = BadRecords(data.max_bad_records)
        text = documents(data.train, records_of(data), field, bad_records, logs_files=False)  # the first pass did
        write_indexed_pairs(text, tokenizer, [everything], kind=data.format, progress=progress)
        _split_tail(everything, data.held_out_fraction, *prefixes)
        _carry_metadata([str(everything)], tokenizer, *prefixes)


def _cache_key(data: DataSpec) -> str:
    excluded = {"cache", "cache_max_bytes", "mask_documents", "train", "source", "held_out", "held_out_sets"}
    excluded |= {"dataset", "end_token"}
    inputs = data.model_dump(mode="json", exclude=excluded)
    inputs["streaming"] = not data.writes_train_tokens
    for field, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        files = list_files(sources, field) if sources else []
        inputs[field] = [file.content_key for file in files]
    template = require_template(data) if data.format == "chat" else chat_template(data)
    if data.format != "text" and template is not None:
        inputs["chat_template"] = asdict(template)
    if data.tokenizer not in ("bpe", "bytes"):
        tokenizer = load_tokenizer(data.tokenizer, data.end_token)
        text = tokenizer.to_json() + (tokenizer.config_json() or "")
        inputs["tokenizer"] = hashlib.sha256(text.encode()).hexdigest()
    return _hash_key([RECIPE_VERSION, inputs])


def _hash_key(inputs: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(inputs).encode("utf-8", "replace")).hexdigest()[:20]
