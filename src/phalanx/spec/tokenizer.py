"""What the tokenizer files of Phalanx say: `data` writes and reads them, `model` exports them."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
"""The token that ends a document."""
BYTES_TOKENIZER = {"type": "bytes"}
"""The tokenizer.json of the byte tokenizer."""
BYTES_VOCAB = 257
"""Its ids: 0 to 255 are the bytes of UTF-8, 256 ends a document."""
