r"""Megatron's .bin/.idx pair: all tokens in one flat file, and the start of each document in the other.

The index, little-endian: magic "MMIDIDX\0\0" | u64 version 1 | u8 dtype code | u64 sequences n
| u64 document entries d | int32 lengths [n], in tokens | int64 pointers [n], in bytes
| int64 documents [d]: the first sequence of each document, then n."""

from __future__ import annotations

import array
import hashlib
import os
import struct
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from phalanx.data.joined_tokens import PARTS_SUFFIX, JoinedTokens, TokenFile, read_token_files, write_token_files
from phalanx.data.packing import shuffle_epoch
from phalanx.spec.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
UINT16_VOCAB = 65_500
FIELD = "data.train"


def token_dtype(vocab: int) -> np.dtype:
    """Return the narrowest of Megatron's types for a vocabulary: uint16 below 65,500 ids, else int32."""
    return np.dtype(np.uint16 if vocab < UINT16_VOCAB else np.int32)


def prefix_of(source: str) -> str | None:
    """Return the prefix of the .bin/.idx pair that `source` names with or without suffix, else None."""
    path = os.path.expanduser(source)
    stem, suffix = os.path.splitext(path)
    if suffix in (".bin", ".idx"):
        return stem
    return path if os.path.isfile(f"{path}.bin") or os.path.isfile(f"{path}.idx") else None


class IndexedWriter:
    """Writer of a pair, document by document, to temporary files until it is complete.

    After a failure no file is left. Use as a context manager. Errors of the file system are raised unchanged (OSError).
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self.lengths = array.array("i")
        self.tokens = 0
        self._ids = np.iinfo(self.dtype)
        self._partial_prefix = f"{self.prefix}.{os.getpid()}.partial"
        self._bin_file = open(f"{self._partial_prefix}.bin", "wb", buffering=1 << 20)  # noqa: SIM115 -- closed by __exit__

    def add(self, ids: np.ndarray) -> None:
        """Append a document's ids [tokens]. Raises ValueError if an id does not fit the type of the file."""
        if ids.size and (int(ids.max()) > self._ids.max or int(ids.min()) < self._ids.min):
            raise ValueError(f"token ids {ids.min()}..{ids.max()} do not fit {self.dtype}")
        self._bin_file.write(np.ascontiguousarray(ids, self.dtype).data)
        self.lengths.append(ids.size)
        self.tokens += ids.size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._bin_file.close()
            if error_type is None:
                lengths = np.frombuffer(self.lengths, np.int32) if self.lengths else np.empty(0, np.int32)
                write_index(f"{self._partial_prefix}.idx", lengths, self.dtype)
                os.replace(f"{self._partial_prefix}.bin", f"{self.prefix}.bin")
                os.replace(f"{self._partial_prefix}.idx", f"{self.prefix}.idx")
        finally:
            for suffix in (".bin", ".idx"):
                Path(self._partial_prefix + suffix).unlink(missing_ok=True)


def write_index(path: str | Path, lengths: np.ndarray, dtype: np.dtype, first: int = 0) -> None:
    """Write the .idx of contiguous documents of `lengths` tokens [n], of which the first starts at `first`."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths + first
    code = next(code for code, token_type in DTYPES.items() if np.dtype(token_type) == dtype)
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        file.write(np.ascontiguousarray(lengths, "<i4").data)
        file.write((starts * dtype.itemsize).astype("<i8").data)
        file.write(np.arange(len(lengths) + 1, dtype="<i8").data)


class IndexedDataset:
    """A memory-mapped pair: `tokens` [all], of which document i is tokens[offsets[i] : offsets[i + 1]].

    If several pairs were joined, `tokens` spans their .bin files. Raises UserError, reported under `field`, if a file
    is missing, truncated, or in another format."""

    def __init__(self, prefix: str | Path, field: str = FIELD) -> None:
        self.prefix = str(prefix)
        is_joined = os.path.isfile(self.prefix + PARTS_SUFFIX)
        for suffix in (".idx",) if is_joined else (".idx", ".bin"):
            if not os.path.isfile(self.prefix + suffix):
                raise UserError(field, self.prefix, f"has no {suffix} file", "use the prefix of a .bin/.idx pair")
        self.tokens: np.ndarray | JoinedTokens
        try:
            dtype, self.offsets = _read_index(f"{self.prefix}.idx", field)
            num_tokens = int(self.offsets[-1])
            if is_joined:
                self.tokens = _map_joined_tokens(self.prefix, field, dtype, num_tokens)
            else:
                self.tokens = _map_tokens(f"{self.prefix}.bin", field, dtype, num_tokens)
        except FileNotFoundError as error:
            problem = f"requires {error.filename}, which does not exist"
            fix = f"restore {error.filename}, or join the pairs again"
            raise UserError(field, self.prefix, problem, fix) from None
        except OSError as error:
            fix = "check the permissions of the pair's files"
            raise UserError(field, self.prefix, f"cannot be read: {error.strerror}", fix) from None
        # The loaders of all phases share it: each increment of a batch would else shuffle the same epoch.
        self.epoch_order = lru_cache(maxsize=2)(partial(shuffle_epoch, self.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def bounds(self) -> tuple[int, int]:
        """First token of the documents and the end of the last, as positions in the flat file."""
        return int(self.offsets[0]), int(self.offsets[-1])

    @property
    def size(self) -> int:
        """Number of tokens in all documents."""
        return int(self.offsets[-1] - self.offsets[0])

    def document(self, index: int) -> np.ndarray:
        """Return the ids of document `index`, [tokens]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def fingerprint(self) -> str:
        """Return an identifier of the content that does not depend on the path.

        It is computed from counts, and from samples throughout both files."""
        digest = hashlib.blake2b(f"{self.tokens.dtype} {len(self)} {self.size}".encode(), digest_size=16)
        first, last = self.bounds
        for values, begin, end in ((self.tokens, first, last), (self.offsets - first, 0, len(self.offsets))):
            for start in begin + np.linspace(0, max(0, end - begin - 1024), num=64, dtype=np.int64):
                digest.update(np.ascontiguousarray(values[start : min(start + 1024, end)]).data)
        return digest.hexdigest()

    def token_files(self) -> list[TokenFile]:
        """Return the files and ranges that contain the tokens of all documents, in order."""
        first, last = self.bounds
        if isinstance(self.tokens, JoinedTokens):
            return self.tokens.files_between(first, last)
        return [TokenFile(os.path.realpath(f"{self.prefix}.bin"), str(self.tokens.dtype), first, size=last - first)]


def _read_index(path: str, field: str) -> tuple[np.dtype, np.ndarray]:
    """Return the type of the tokens, and the start of each document in the flat file, int64 [documents + 1]."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
        raise _damaged_pair_error(field, path, "is not a Megatron index: its first bytes are not MMIDIDX")
    if len(header) < HEADER.size:
        raise _damaged_pair_error(field, path, f"is truncated: it has {size} bytes, but its header needs {HEADER.size}")
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != VERSION:
        raise _damaged_pair_error(field, path, f"has format version {version}, but only version {VERSION} is supported")
    if code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise _damaged_pair_error(field, path, f"has the unknown token type {code}; known types: {known}")
    required_bytes = HEADER.size + 12 * sequences + 8 * entries
    if size < required_bytes:
        needed = f"{sequences:,} sequences need {required_bytes:,}"
        raise _damaged_pair_error(field, path, f"is truncated: it has {size:,} bytes, but {needed}")
    raw = np.memmap(path, np.uint8, "r")
    bounds = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * entries])
    lengths, pointers, documents = (
        np.frombuffer(raw[start:stop], field_dtype)
        for start, stop, field_dtype in zip(bounds, bounds[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    if not len(documents) or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        problem = f"has document starts that do not increase from 0 to {sequences:,}, the number of sequences"
        raise _damaged_pair_error(field, path, problem)
    dtype = np.dtype(DTYPES[code])
    starts = np.empty(sequences + 1, np.int64)
    starts[0] = pointers[0] // dtype.itemsize if sequences else 0
    np.cumsum(lengths, out=starts[1:])
    starts[1:] += starts[0]
    if (lengths < 0).any() or not np.array_equal(starts[:-1] * dtype.itemsize, pointers):
        raise _damaged_pair_error(field, path, "has sequences that are not contiguous in the .bin file")
    return dtype, starts[documents]


def _map_tokens(path: str, field: str, dtype: np.dtype, num_tokens: int) -> np.ndarray:
    size = os.path.getsize(path)
    needed_bytes = num_tokens * dtype.itemsize
    if size < needed_bytes:
        problem = f"is truncated: it has {size:,} bytes, but its index needs {needed_bytes:,}"
        raise _damaged_pair_error(field, path, problem)
    if not num_tokens:
        return np.empty(0, dtype)
    # A view, because direct indexing of a memmap is slow.
    return np.memmap(path, dtype, "r", shape=(num_tokens,)).view(np.ndarray)


def _map_joined_tokens(prefix: str, field: str, dtype: np.dtype, num_tokens: int) -> JoinedTokens:
    try:
        files = read_token_files(prefix)
        maps = [_map_tokens(f.path, field, np.dtype(f.dtype), f.first + f.size)[f.first :] for f in files]
        is_complete = sum(file.size for file in files) >= num_tokens and all(file.first >= 0 for file in files)
    except UserError:
        raise
    except (ValueError, TypeError):
        is_complete = False
    if not is_complete:
        problem = "is damaged: it does not list the .bin files of all tokens in the index"
        raise _damaged_pair_error(field, f"{prefix}{PARTS_SUFFIX}", problem)
    return JoinedTokens(files, maps, dtype)


def _damaged_pair_error(field: str, path: str, problem: str) -> UserError:
    fix = "recreate the pair with `phalanx data prepare` or Megatron's preprocess_data.py"
    return UserError(field, path, problem, fix)


def split_tail(dataset: IndexedDataset, fraction: float, head: str | Path, tail: str | Path, unit: int = 0) -> None:
    """Split a pair into two: prefix `tail` has the last `fraction` of its tokens, `head` the others, each at least one.

    No token is copied: the new pairs have links to the dataset's tokens. Each has a multiple of `unit` documents; with
    0, a document may be cut. Raises UserError if the dataset has fewer than two tokens, or units."""
    if (len(dataset) // unit if unit else dataset.size) < 2:
        fix = "add text, or set data.held_out"
        raise UserError(FIELD, dataset.prefix, "has too few tokens for a held-out part", fix)
    start, end = dataset.bounds
    split = end - min(max(1, round(dataset.size * fraction)), dataset.size - 1)
    if unit:
        bounds_of_units = dataset.offsets[unit:-1:unit]
        split = int(bounds_of_units[np.abs(bounds_of_units - split).argmin()])
    inner_offsets = dataset.offsets[1:-1]
    for prefix, lower, upper in ((head, start, split), (tail, split, end)):
        bounds = np.array([lower, *inner_offsets[(inner_offsets > lower) & (inner_offsets < upper)], upper])
        write_index(f"{prefix}.idx", np.diff(bounds), dataset.tokens.dtype, first=lower)
        suffix = PARTS_SUFFIX if isinstance(dataset.tokens, JoinedTokens) else ".bin"
        path = f"{dataset.prefix}{suffix}"
        # A link within a folder has only the name, so that the folder can be renamed.
        is_same_folder = os.path.dirname(path) == str(Path(prefix).parent)
        os.symlink(os.path.basename(path) if is_same_folder else os.path.abspath(path), f"{prefix}{suffix}")


def join_pairs(datasets: Sequence[IndexedDataset], prefix: str | Path) -> None:
    """Join several pairs into one, with their documents in order; no token is copied."""
    dtype = np.result_type(*(dataset.tokens.dtype for dataset in datasets))
    write_index(f"{prefix}.idx", np.concatenate([np.diff(dataset.offsets) for dataset in datasets]), dtype)
    write_token_files(prefix, [file for dataset in datasets for file in dataset.token_files()])
