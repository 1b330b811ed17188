"""Typed decoding of the files of a run directory, which disks, editors and other people's programs may have damaged.

Each file has one reader, which decodes its JSON by the type of its records. A record of another type is damaged: a
problem of the report, and never an exception elsewhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, TypeAdapter

T = TypeVar("T")
Decode = Callable[[bytes], T]
"""Function that decodes JSON, and raises ValueError for JSON of another type."""

MAX_RANKS = 2**20
MAX_NUMBER = 1e18
"""Bounds of the numbers in records: larger ones are damage, and would overflow in sums or fill the memory."""
Number = Annotated[int | float, Field(allow_inf_nan=False, ge=-MAX_NUMBER, le=MAX_NUMBER)]
MAX_FINITE = 1e300
Finite = Annotated[int | float, Field(allow_inf_nan=False, ge=-MAX_FINITE, le=MAX_FINITE)]
"""A number that training computes. A diverging run may write any, but sums of them must not overflow."""
Amount = Annotated[int | float, Field(allow_inf_nan=False, ge=0, le=MAX_NUMBER)]
"""A number that is not negative, such as seconds."""
Count = Annotated[int, Field(ge=0, le=int(MAX_NUMBER))]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
WorldSize = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Index = Annotated[str, StringConstraints(pattern=r"^(0|[1-9]\d{0,6})$")]
"""A key of a JSON object that is a number, such as a stage."""


def require_keys(*keys: str) -> AfterValidator:
    """Return the validator of a dictionary of any keys that must have these."""

    def check(table: dict[str, Any]) -> dict[str, Any]:
        if not table.keys() >= set(keys):
            raise ValueError(f"one of {', '.join(keys)} is missing")
        return table

    return AfterValidator(check)


def decoder(json_type: Any) -> Decode[Any]:
    """Return the decoder of a type. It does not convert values, and bounds the depth of nested values."""
    adapter = TypeAdapter(json_type)
    return lambda content: adapter.validate_json(content, strict=True)


def union_decoder(key: str, types: Mapping[str, Any], default_type: Any) -> Decode[Any]:
    """Return the decoder of objects whose type depends on the text of the field `key`.

    `types` maps this text to the type; `default_type` is the type of objects with any other text.
    """

    def select_tag(value: Any) -> str:
        text = value.get(key) if isinstance(value, dict) else None
        return text if isinstance(text, str) and text in types else ""

    tagged = [Annotated[json_type, Tag(tag)] for tag, json_type in (*types.items(), ("", default_type))]
    return decoder(Annotated[Union[tuple(tagged)], Discriminator(select_tag)])  # noqa: UP007 -- of a tuple


def accept_old_keys(decode: Decode[T], new_keys: Mapping[str, str]) -> Decode[T]:
    """Return a decoder that also accepts lines of earlier versions, in which keys had other names.

    `new_keys` has today's key by the key of before 2026-11-28. Today's lines have the first of them.
    """
    renamed = {f'"{old}":'.encode(): f'"{new}":'.encode() for old, new in new_keys.items()}
    first_of_today = next(iter(renamed.values()))

    def decode_renamed(content: bytes) -> T:
        if first_of_today not in content:
            # In a text, the quotes around a key are escaped.
            for old, new in renamed.items():
                content = content.replace(old, new, 1)
        return decode(content)

    return decode_renamed


decode_object: Decode[dict[str, Any]] = decoder(dict[str, Any])
"""Decode an object with any values."""


def check_regular_file(file: Path) -> None:
    """Raise OSError unless a file exists and is a regular one. A pipe in its place would block its reader."""
    if not file.is_file():
        code = errno.EINVAL if file.exists() else errno.ENOENT
        raise OSError(code, os.strerror(code), str(file))


def read_bytes(file: Path) -> bytes:
    """Return the content of a file. Raises OSError if the file cannot be read."""
    check_regular_file(file)
    return file.read_bytes()


def read_json(file: Path, decode: Decode[T]) -> T:
    """Return the decoded content of a file.

    Raises OSError if the file cannot be read, and ValueError if the content is damaged.
    """
    return decode(read_bytes(file))


def unreadable_file(file: Path) -> str:
    """Return the problem of a damaged or unreadable file in a folder of the run directory."""
    return f"{file.parent.name}/{file.name} cannot be read"
