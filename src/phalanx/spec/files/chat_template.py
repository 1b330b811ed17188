"""The chat template in the files of a tokenizer."""

from __future__ import annotations

from pathlib import Path

from phalanx.spec.errors import UserError
from phalanx.spec.files.hub import TOKENIZER_CONFIG_FILE
from phalanx.spec.files.tables import read_json

JINJA_FILE = "chat_template.jinja"
"""The template in a file of its own, which transformers prefers to one in tokenizer_config.json."""


def chat_template_text(directory: Path) -> str | None:
    """Return the chat template in the files next to a tokenizer.json; None if there is none.

    Of several with names, it is "default". Raises UserError if a file cannot be read."""
    file = directory / JINJA_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError("data.tokenizer", str(file), f"cannot be read: {reason}", "download it again") from None
    config = directory / TOKENIZER_CONFIG_FILE
    source = (
        read_json(config, "data.tokenizer", fix="download it again").get("chat_template") if config.is_file() else None
    )
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None
