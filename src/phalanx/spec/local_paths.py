"""Check of local paths in run files and on command lines: a URL would become a folder named like its scheme."""

from __future__ import annotations

import re

from phalanx.spec.errors import UserError

URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)


def check_local_path(field: str, value: str) -> str:
    """Return a path, or raise UserError if it is a URL."""
    return _refuse_url(field, value, path=value, supported="local paths")


def check_text_source(field: str, value: str) -> str:
    """Return a local path, or `hf:` with a name or directory; raise UserError if it is a URL."""
    supported = "local paths and hf:NAME"
    _refuse_url(field, value, path=value, supported=supported)
    return _refuse_url(field, value, path=value.removeprefix("hf:"), supported=supported)


def _refuse_url(field: str, value: str, *, path: str, supported: str) -> str:
    if match := URL.match(path):
        scheme, rest = match.groups()
        fix = f"write {rest!r}" if scheme.lower() == "file" else "mount or copy the files, and use their local path"
        raise UserError(field, value, f"is a URL, but only {supported} are supported", fix)
    return value
