"""Damage of files, as disks, editors and other programs cause it: drawn by a seed, structured or random."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

BRACKETS = 100_000
RAW_VALUES = (
    "null",
    "true",
    "-1",
    "0",
    "0.0",
    "1e400",
    "-1e300",
    "NaN",
    "9" * 30,
    "9" * 400,
    "9" * 5000,
    '"text"',
    '""',
    '"7"',
    r'"\u001b]0;title\u0007\u001b[2J"',
    r'"\ud800"',
    '"[bold]rich[/italic]"',
    '"a\\nb"',
    '"' + "x" * 100_000 + '"',
    "[]",
    "{}",
    "[[]]",
    '["text"]',
    "[1e400, null]",
    '{"text": "text"}',
    '{"0": null}',
    "[" * BRACKETS + "]" * BRACKETS,
    '{"a":' * BRACKETS + "1" + "}" * BRACKETS,
    "[" * 150 + "]" * 150,
)
"""JSON values that replace any other value."""
TOML_VALUES = (
    "true",
    "-1",
    "0",
    "inf",
    "nan",
    "1e400",
    "9" * 400,
    '"text"',
    '""',
    '"\\u001b[2J"',
    '"[bold]rich[/italic]"',
    "[]",
    "{}",
    "{ a = 1 }",
    "1979-05-27",
    "[" * 3000 + "]" * 3000,
    "[" * 150 + "]" * 150,
    "{ a = " * 3000 + "1" + "}" * 3000,
)
_MARK = "\u2603"


def damage(file: Path, random: Random) -> str:
    """Damage a file, and return a description of the damage."""
    kinds: list[Callable[[Path, Random], str]] = [_flip, _flip, _random_bytes, _cut, _splice, _replace_entry]
    structured = _structured_damage(file)
    if structured is not None and random.random() < 0.6:
        return structured(file, random)
    return random.choice(kinds)(file, random)


def _structured_damage(file: Path) -> Callable[[Path, Random], str] | None:
    name = file.name
    if name.endswith(".toml"):
        return _damage_toml
    if name.endswith((".json", ".jsonl", ".calls", ".json.gz")):
        return _damage_json
    if name.endswith(".safetensors"):
        return _damage_header
    return None


def _damage_json(file: Path, random: Random) -> str:
    """Replace or remove one value in one of the file's JSON values."""
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    is_lines = file.suffix in (".jsonl", ".calls")
    lines = content.decode().splitlines() if is_lines else [content.decode()]
    number = random.randrange(len(lines))
    value = [json.loads(lines[number])]
    holder, key = random.choice(list(_places(value)))
    damage = random.choice(("value", "value", "value", "value", "missing key", "renamed key"))
    raw = random.choice(RAW_VALUES)
    if damage == "value" or not isinstance(holder, dict):
        damage = f"{key!r} is {raw[:40]}"
        holder[key] = _MARK
    elif damage == "missing key":
        damage = f"no {key!r}"
        del holder[key]
    else:
        damage = f"{key!r} has another name"
        holder[random.choice(("text", "7", "-1", "\x1b[2J", key + "x"))] = holder.pop(key)
    lines[number] = json.dumps(value)[1:-1].replace(json.dumps(_MARK), raw)
    content = "".join(f"{line}\n" for line in lines).encode() if is_lines else lines[0].encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return f"line {number + 1}: {damage}"


def _damage_header(file: Path, random: Random) -> str:
    """Damage the header of a safetensors file, and correct the checksums of its folder."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size]
    if random.random() < 0.6:
        value = [json.loads(header)]
        holder, key = random.choice(list(_places(value)))
        damage = f"{key!r} is damaged"
        raw = random.choice(RAW_VALUES)
        holder[key] = _MARK
        header = json.dumps(value)[1:-1].replace(json.dumps(_MARK), raw).encode()
    else:
        damaged = bytearray(header)
        offset = random.randrange(size)
        damaged[offset] ^= 1 << random.randrange(8)
        header = bytes(damaged)
        damage = f"byte {offset} is {header[offset : offset + 1]!r}"
    length = len(header) if random.random() < 0.9 else random.choice((0, 2**63, len(header) - 1))
    file.write_bytes(length.to_bytes(8, "little") + header + content[8 + size :])
    sums = file.parent / "SHA256SUMS"
    if sums.exists():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        sums.write_text(re.sub(rf"(?m)^\w+  {file.name}$", f"{digest}  {file.name}", sums.read_text()))
    return f"header with correct checksums: {damage}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of each value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield value, key
        yield from _places(part)


def _damage_toml(file: Path, random: Random) -> str:
    lines = file.read_text().splitlines()
    number = random.choice([index for index, line in enumerate(lines) if re.match(r"\w+ = ", line)])
    key = lines[number].partition(" = ")[0]
    raw = random.choice((*TOML_VALUES, ""))
    lines[number] = f"{key} = {raw}" if raw else ""
    file.write_text("\n".join(lines) + "\n")
    return f"{key} = {raw[:40]}"


def _flip(file: Path, random: Random) -> str:
    """Flip one bit, or set one byte to any value."""
    content = bytearray(file.read_bytes())
    if not content:
        return _random_bytes(file, random)
    offset = random.randrange(len(content))
    original = content[offset : offset + 1]
    content[offset] = content[offset] ^ (1 << random.randrange(8)) if random.random() < 0.5 else random.randrange(256)
    file.write_bytes(content)
    return f"byte {offset}: {bytes(original)!r} is {bytes(content[offset : offset + 1])!r}"


def _random_bytes(file: Path, random: Random) -> str:
    file.write_bytes(random.randbytes(random.choice((1, 20, 3000))) + random.choice((b"", b"\n")))
    return "random bytes"


def _cut(file: Path, random: Random) -> str:
    content = file.read_bytes()
    size = random.choice((0, random.randrange(len(content) + 1)))
    file.write_bytes(content[:size])
    return f"cut to {size} bytes"


def _splice(file: Path, random: Random) -> str:
    """Repeat, remove or overwrite a part."""
    content = file.read_bytes()
    start, end = sorted(random.randrange(len(content) + 1) for _ in range(2))
    damage = random.choice(("repeated", "removed", "zero", "random"))
    part = {
        "repeated": 2 * content[start:end],
        "removed": b"",
        "zero": bytes(end - start),
        "random": random.randbytes(end - start),
    }[damage]
    file.write_bytes(content[:start] + part + content[end:])
    return f"bytes {start} to {end} are {damage}"


def _replace_entry(file: Path, random: Random) -> str:
    """Replace the file by something else."""
    replacement = random.choice(
        ("nothing", "a dangling link", "a link to itself", "a directory", "a pipe", "a folder's link")
    )
    file.unlink()
    match replacement:
        case "a dangling link":
            file.symlink_to(file.parent / "nowhere")
        case "a link to itself":
            file.symlink_to(file.name)
        case "a directory":
            file.mkdir()
        case "a pipe":
            os.mkfifo(file)
        case "a folder's link":
            file.symlink_to("/")
    return f"{replacement} in its place"


def remove_entry(path: Path) -> None:
    """Remove a path of any kind."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
