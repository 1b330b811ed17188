"""A run's tokenizer as files for transformers' AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.files.chat_template import JINJA_FILE, chat_template_text
from phalanx.spec.run import BYTES_TOKENIZER, END_OF_TEXT

VOCABULARY_FILES = ("vocab.json", "merges.txt", "tokenizer.model")
"""Files that repeat the vocabulary of tokenizer.json, without added tokens."""


def hf_tokenizer_files(path: Path, eos_id: int | None, context: int) -> dict[str, str]:
    """Return the texts of tokenizer.json and tokenizer_config.json, by file name.

    Args:
        path: Path of a tokenizer.json.
        eos_id: Id of the end-of-text token.
        context: Maximum number of tokens of the model.

    Raises:
        UserError: `path` is not a tokenizer.json.
    """
    text, tokenizer = _read_tokenizer(path)
    eos_token = None if eos_id is None else tokenizer.id_to_token(eos_id)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if eos_token is not None:
        config |= {"bos_token": eos_token, "eos_token": eos_token, "pad_token": eos_token}
    files = {"tokenizer.json": text, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    template = chat_template_text(path.parent)
    return files if template is None else {**files, JINJA_FILE: template}


def outdated_tokenizer_files(path: Path, source: Path) -> set[str] | None:
    """Return the names of the files in `source` that the tokenizer at `path` contradicts.

    The set is empty if it is the tokenizer of `source`. It has the chat template if that is another one, and
    tokenizer.json and vocabulary files if the tokenizer adds ids. None means another tokenizer, so that no tokenizer
    file of `source` is valid."""
    _, tokenizer = _read_tokenizer(path)
    try:
        _, source_tokenizer = _read_tokenizer(source / "tokenizer.json")
    except UserError:
        return None
    own_template = chat_template_text(path.parent)
    is_same = own_template is None or own_template == chat_template_text(source)
    changed = set() if is_same else {JINJA_FILE}
    source_tokenizer.no_padding()  # as `data.tokenizer` reads it
    source_tokenizer.no_truncation()
    if source_tokenizer.to_str() == tokenizer.to_str():
        return changed
    if not source_tokenizer.get_vocab().items() <= tokenizer.get_vocab().items():
        return None
    model, source_model = (json.loads(either.to_str())["model"] for either in (tokenizer, source_tokenizer))
    return {"tokenizer.json", *changed, *(() if model == source_model else VOCABULARY_FILES)}


def _read_tokenizer(path: Path) -> tuple[str, Any]:
    """Return the text of a tokenizer.json, and its `tokenizers.Tokenizer`."""
    from tokenizers import Tokenizer

    try:
        text = path.read_text(encoding="utf-8")
        text = byte_tokenizer_json() if json.loads(text) == BYTES_TOKENIZER else text
        return text, Tokenizer.from_str(text)
    except Exception as error:  # the bindings raise bare Exception
        raise UserError("tokenizer", str(path), f"cannot be read: {error}", fix="use a tokenizer.json") from None


def byte_tokenizer_json() -> str:
    """Return the byte tokenizer as a BPE without merges.

    Its ids are 0..255 for the bytes of UTF-8, and 256 for the end of text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's alphabet: a printable byte is its own character, the others follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    non_printable = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(non_printable)}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return str(tokenizer.to_str(pretty=True))
