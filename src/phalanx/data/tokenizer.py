"""Tokenizer between text and token ids: a Hugging Face `tokenizers` file, or plain bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.chat_template import BUILT_IN_TEMPLATES, ChatTemplate, check_template
from phalanx.spec.base import did_you_mean
from phalanx.spec.errors import UserError
from phalanx.spec.files.chat_template import chat_template_text
from phalanx.spec.files.hub import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, hub_name, tokenizer_directory
from phalanx.spec.files.replace import replace_file
from phalanx.spec.files.tables import parse_json, read_json
from phalanx.spec.run import BYTES_TOKENIZER, BYTES_VOCAB, END_OF_TEXT, DataSpec

END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
"""Known end-of-text tokens, the first of which ends documents if no file next to the tokenizer names another."""
FIELD = "data.tokenizer"
VARIABLES_KEY = "chat_template_variables"
"""Key of the special tokens of a template in the tokenizer_config.json that Phalanx writes."""

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
    chat: ChatTemplate | None = None
    """Template that renders conversations; None: there is none."""

    @property
    def end_text(self) -> str:
        """The end token as text."""
        return END_OF_TEXT if self.model is None else str(self.model.id_to_token(self.end))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [tokens], without end token.

        Special tokens in the text are encoded as plain text."""
        if self.model is None:
            encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
            return [np.frombuffer(raw, np.uint8).astype(np.int32) for raw in encoded]
        clean = [text if text.isascii() else _replace_surrogates(text) for text in texts]
        encodings = self.model.encode_batch_fast(clean, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str], has_special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of each text, int32 [tokens], and the characters of each id, int64 [tokens, 2].

        With `has_special`, special tokens in the text are tokens; else they are encoded as plain text."""
        if self.model is None:
            return [self._encode_bytes(text, has_special) for text in texts]
        model = self._model_of_rendered_text if has_special else self.model
        encodings = model.encode_batch([_replace_surrogates(text) for text in texts], add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2))
            for encoding in encodings
        ]

    def _encode_bytes(self, text: str, has_special: bool) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for number, part in enumerate(text.split(END_OF_TEXT) if has_special else [text]):
            if number:
                ids.append(self.end)
                offsets.append((position, position + len(END_OF_TEXT)))
                position += len(END_OF_TEXT)
            for character in part:
                raw = character.encode("utf-8", "surrogatepass")
                ids += raw
                offsets += [(position, position + 1)] * len(raw)
                position += 1
        return np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2)

    @cached_property
    def _model_of_rendered_text(self) -> Any:
        import tokenizers

        # The file does not have `encode_special_tokens`, which is false in a new model.
        return tokenizers.Tokenizer.from_str(self.model.to_str())

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

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, with the end token."""
        parts: list[list[int]] = [[]]
        for token in ids:
            if token == self.end:
                parts.append([])
            else:
                parts[-1].append(token)
        return self.end_text.join(self.decode(part) if part else "" for part in parts)

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

    def config_json(self) -> str | None:
        """Return the JSON text of tokenizer_config.json, with the end token and the chat template.

        None if tokenizer.json is enough to know the end token, and there is not a template."""
        has_known_end = self.model is None or self.end == _known_end(self.model.get_vocab())
        if has_known_end and self.chat is None:
            return None
        config: dict[str, Any] = {}
        if self.chat is not None:
            # The end token of documents may be another one than that of the template.
            config = {VARIABLES_KEY: dict(self.chat.variables), "chat_template": self.chat.source}
        if self.model is not None:
            own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.model.id_to_token(self.end)}
            config = own | config
        return json.dumps(config, indent=2, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, and tokenizer_config.json if needed; the byte tokenizer's is {"type": "bytes"}."""
        replace_file(Path(path), self.to_json())
        if (config := self.config_json()) is not None:
            replace_file(Path(path).with_name(TOKENIZER_CONFIG_FILE), config)


def byte_tokenizer() -> Tokenizer:
    """Return the byte tokenizer: ids 0..255 are the bytes of UTF-8, 256 is the end of text.

    Every text survives the round trip."""
    return Tokenizer(vocab=BYTES_VOCAB, end=BYTES_VOCAB - 1)


def load_tokenizer(path: str | Path, end_token: str | None = None) -> Tokenizer:
    """Read a tokenizer.json, ours or Hugging Face's.

    `path` is the file, its directory, or a model on the hub. Documents end with `end_token`. If it is None, they end
    with the token that the files next to tokenizer.json name as `eos_token`, else with a known end-of-text token.
    Raises UserError if the file is missing, is not a tokenizer, or has no end token."""
    name = hub_name(path)
    file = Path(path).expanduser() if name is None else tokenizer_directory(FIELD, name)
    file = file / TOKENIZER_FILE if file.is_dir() else file
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
    chat = read_chat_template(file.parent)
    if table == BYTES_TOKENIZER:
        return replace(byte_tokenizer(), chat=chat)
    if not isinstance(table, dict) or "model" not in table:
        raise _invalid_tokenizer_error(path, 'is not a tokenizer: it has no "model" entry')
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the bindings raise bare Exception
        raise _invalid_tokenizer_error(path, f"cannot be read by the installed tokenizers package: {error}") from None
    if end_token is not None and model.token_to_id(end_token) is None:
        fix = did_you_mean(end_token, list(model.get_vocab()), f"use a token of {path}")
        raise UserError("data.end_token", end_token, "is not a token of data.tokenizer", fix)
    own_end = end_token or _own_end_token(file.parent, model)
    end = _known_end(model.get_vocab()) if own_end is None else model.token_to_id(own_end)
    if end is None:
        fix = f"set data.end_token to one of its tokens, or add one of {', '.join(END_TOKENS)}"
        raise UserError(FIELD, str(path), "has no end-of-text token", fix)
    return replace(_wrap_model(model, end), chat=chat)


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """Return the chat template next to a tokenizer.json, with its special tokens; None if there is none."""
    source = chat_template_text(directory)
    return None if source is None else ChatTemplate(source, _special_tokens(directory))


def _special_tokens(directory: Path) -> tuple[tuple[str, str], ...]:
    """Return the special tokens by name, such as eos_token, that the files next to a tokenizer.json name."""
    variables = _read_config(directory, TOKENIZER_CONFIG_FILE).get(VARIABLES_KEY)
    if isinstance(variables, dict):
        return tuple(variables.items())
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG_FILE):
        config |= _read_config(directory, name)
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return tuple((name, token) for name, token in tokens.items() if isinstance(token, str))


def _read_config(directory: Path, name: str) -> dict[str, Any]:
    file = directory / name
    return read_json(file, FIELD, fix="download it again") if file.is_file() else {}


def chat_template(data: DataSpec) -> ChatTemplate | None:
    """Return the template that renders the conversations of `data`; None if there is none.

    Raises UserError if `data.chat_template` cannot be read, or has an error."""
    own = None
    variables: tuple[tuple[str, str], ...] = (("eos_token", END_OF_TEXT),)
    if data.tokenizer not in ("bpe", "bytes"):
        name = hub_name(data.tokenizer)
        path = Path(data.tokenizer).expanduser() if name is None else tokenizer_directory(FIELD, name)
        directory = path if path.is_dir() else path.parent
        own = read_chat_template(directory)
        variables = _special_tokens(directory)
    template = own
    if data.chat_template is not None:
        built_in = BUILT_IN_TEMPLATES.get(data.chat_template)
        template = ChatTemplate(built_in or _read_template(Path(data.chat_template).expanduser()), variables)
    if template is not None and (problem := check_template(template.source)) is not None:
        value = data.chat_template or data.tokenizer
        raise UserError("data.chat_template", value, problem, "correct the template")
    return template


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        where = "" if path.is_absolute() else f" (relative to the current directory: {path.absolute()})"
        fix = did_you_mean(
            str(path),
            list(BUILT_IN_TEMPLATES),
            f"use a Jinja file, or one of {', '.join(map(repr, BUILT_IN_TEMPLATES))}",
        )
        raise UserError("data.chat_template", str(path), f"cannot be read: {reason}{where}", fix) from None


def _own_end_token(directory: Path, model: Any) -> str | None:
    """Return the end token that the files next to a tokenizer.json name; None if they name none of its tokens."""
    for name in (TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "generation_config.json"):
        file = directory / name
        if not file.is_file():
            continue
        table = read_json(file, FIELD, fix="download it again")
        token = table.get("eos_token")
        # A token with its flags, or the ids of several, of which the first ends a text.
        token = token.get("content") if isinstance(token, dict) else token
        ids = table.get("eos_token_id")
        first_id = ids[0] if isinstance(ids, list) and ids else ids
        if token is None and isinstance(first_id, int) and first_id >= 0:
            token = model.id_to_token(first_id)
        if isinstance(token, str) and model.token_to_id(token) is not None:
            return token
    return None


def _known_end(vocabulary: Mapping[str, int]) -> int | None:
    """Return the id of the first known end-of-text token; None if the vocabulary has none."""
    return next((vocabulary[token] for token in END_TOKENS if token in vocabulary), None)


def tokenizer_without_training(data: DataSpec) -> Tokenizer | None:
    """Return the tokenizer if it needs no training, else None. Raises UserError for an invalid file."""
    if data.tokenizer == "bpe":
        return None
    model = byte_tokenizer() if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer, data.end_token)
    return with_chat_template(model, data)


def with_chat_template(model: Tokenizer, data: DataSpec) -> Tokenizer:
    """Return a tokenizer with `data.chat_template`, if it is set."""
    return model if data.chat_template is None else replace(model, chat=chat_template(data))


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
    return _wrap_model(model, special.index(END_OF_TEXT))


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


def _wrap_model(model: Any, end: int) -> Tokenizer:
    # A document that contains the text <|endoftext|> must not end there.
    model.encode_special_tokens = True
    model.no_padding()
    model.no_truncation()
    return Tokenizer(vocab=max(model.get_vocab().values()) + 1, end=end, model=model)


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
