"""Tokenizer between text and token ids: a Hugging Face `tokenizers` file, or plain bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.spec.errors import UserError
from phalanx.spec.files.tables import parse_json
from phalanx.spec.run import BYTES_TOKENIZER, BYTES_VOCAB, END_OF_TEXT, DataSpec

END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
FIELD = "data.tokenizer"

# A pretoken is a line with the indent of the next, so that merges span words ("if not ", "):\n        "), as in
# SuperBPE (arXiv 2503.13423). At a vocabulary of 2048, the library's held-out files have 3.35 bytes per token; with
# words as pretokens they have 3.04 and with GPT-2's pattern 2.81. The bounds are for text without newlines.
PATTERN = r"[^\n]{0,100}\n\s{0,100}|[^\n]{1,100}"
SAMPLE_CHARACTERS = 1_000_000
PIECE_CHARACTERS = 2048
MAX_READ_CHARACTERS = 64_000_000


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary of V ids. `model` is a `tokenizers.Tokenizer`, or None for the byte tokenizer."""

    vocab: int
    """Number of ids (V): one more than the largest."""
    end: int
    """Id of the end-of-text token."""
    model: Any = None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [tokens], without end token.

        Special tokens in the text are encoded as plain text."""
        if self.model is None:
            encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
            return [np.frombuffer(raw, np.uint8).astype(np.int32) for raw in encoded]
        clean = [text if text.isascii() else _replace_surrogates(text) for text in texts]
        encodings = self.model.encode_batch_fast(clean, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of some ids, without the end token. Bytes that are not valid UTF-8 become U+FFFD."""
        text_ids = [int(i) for i in ids if int(i) != self.end]
        if self.model is not None:
            return str(self.model.decode(text_ids, skip_special_tokens=False))
        raw = bytes(text_ids)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")

    def token_bytes(self) -> np.ndarray:
        """Return the number of text bytes per id, int32 [V]; 0 for special tokens and unused ids."""
        sizes = np.zeros(self.vocab, np.int32)
        if self.model is None:
            sizes[: self.end] = 1
            return sizes
        added = self.model.get_added_tokens_decoder()
        table = json.loads(self.model.to_str())
        byte_level = "ByteLevel" in json.dumps([table["pre_tokenizer"], table["decoder"]])
        for token, index in self.model.get_vocab().items():
            if index in added:
                sizes[index] = 0 if added[index].special else len(token.encode())
            else:
                # The byte-level alphabet encodes each byte as one character.
                sizes[index] = len(token) if byte_level else _count_piece_bytes(token)
        return sizes

    def to_json(self) -> str:
        """Return the tokenizer as JSON text, as in tokenizer.json."""
        return json.dumps(BYTES_TOKENIZER) + "\n" if self.model is None else str(self.model.to_str(pretty=True))

    def fingerprint(self) -> str:
        """Return the SHA-256 of vocabulary, merges and end token, independent of the file format."""
        if self.model is None:
            return hashlib.sha256(b"bytes").hexdigest()
        merges = json.loads(self.model.to_str())["model"].get("merges") or []
        spelled_merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
        content = [sorted(self.model.get_vocab().items()), spelled_merges, self.end]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json; the byte tokenizer's is {"type": "bytes"}."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """Return the byte tokenizer: ids 0..255 are the bytes of UTF-8, 256 is the end of text.

    Every text survives the round trip."""
    return Tokenizer(vocab=BYTES_VOCAB, end=BYTES_VOCAB - 1)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json (or the directory that contains one), ours or Hugging Face's.

    Raises UserError if the file is missing, is not a tokenizer, or has no known end-of-text token."""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(FIELD, str(path), "does not exist", 'use a tokenizer.json, "bpe" or "bytes"') from None
    except UnicodeDecodeError:
        raise _invalid_tokenizer_error(path, "is not UTF-8 text") from None
    except OSError as error:
        fix = "check the permissions of this file"
        raise UserError(FIELD, str(path), f"cannot be read: {error.strerror}", fix) from None
    try:
        table = parse_json(text)
    except ValueError:
        raise _invalid_tokenizer_error(path, "is not valid JSON") from None
    if table == BYTES_TOKENIZER:
        return byte_tokenizer()
    if not isinstance(table, dict) or "model" not in table:
        raise _invalid_tokenizer_error(path, 'is not a tokenizer: it has no "model" entry')
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the bindings raise bare Exception
        raise _invalid_tokenizer_error(path, f"cannot be read by the installed tokenizers package: {error}") from None
    return _wrap_model(model, str(path))


def tokenizer_without_training(data: DataSpec) -> Tokenizer | None:
    """Return the tokenizer if it needs no training, else None. Raises UserError for an invalid file."""
    if data.tokenizer == "bpe":
        return None
    return byte_tokenizer() if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer)


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab` ids, the first of them <|endoftext|>.

    The same texts give the same ids. The text is limited to 64 million characters; training uses a million of them, in
    pieces at even intervals. Raises UserError if the text is empty."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Model

    sample = _sample_texts(texts)
    if not any(sample):
        raise UserError("data.train", None, "has no text to train a tokenizer on", "use files that contain text")
    model = Model(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [END_OF_TEXT]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(sample, trainer)
    return _wrap_model(model, "bpe")


def _sample_texts(texts: Iterable[str]) -> list[str]:
    parts: list[str] = []
    total = 0
    for text in texts:
        parts.append(_replace_surrogates(text[: MAX_READ_CHARACTERS - total]))
        total += len(parts[-1])
        if total >= MAX_READ_CHARACTERS:
            break
    if total <= SAMPLE_CHARACTERS:
        return parts
    # Joined, because a piece may span texts that are shorter than the piece.
    joined = "\n".join(parts)
    stride = PIECE_CHARACTERS * len(joined) // SAMPLE_CHARACTERS
    return [joined[start : start + PIECE_CHARACTERS] for start in range(0, len(joined), stride)]


def _wrap_model(model: Any, name: str) -> Tokenizer:
    vocabulary = model.get_vocab()
    end = next((vocabulary[token] for token in END_TOKENS if token in vocabulary), None)
    if end is None:
        fix = f"add one of {', '.join(END_TOKENS)} as a special token"
        raise UserError(FIELD, name, "has no end-of-text token", fix)
    # A document that contains the text <|endoftext|> must not end there.
    model.encode_special_tokens = True
    model.no_padding()
    model.no_truncation()
    return Tokenizer(vocab=max(vocabulary.values()) + 1, end=end, model=model)


def _invalid_tokenizer_error(path: str | Path, problem: str) -> UserError:
    return UserError(FIELD, str(path), problem, "use a tokenizer.json that Hugging Face `tokenizers` has saved")


def _replace_surrogates(text: str) -> str:
    # JSON may contain lone surrogates, which UTF-8 libraries reject.
    return text.encode("utf-8", "replace").decode("utf-8")


def _count_piece_bytes(token: str) -> int:
    """Return the bytes of a SentencePiece-style piece: "▁" is a space, "<0x0A>" is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())
