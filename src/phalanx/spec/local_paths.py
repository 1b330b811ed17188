"""Check of paths and URLs in run files and on command lines.

A URL in a field for local paths would become a folder named like its scheme.
"""

from __future__ import annotations

import difflib
import re

from phalanx.spec.errors import UserError

URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
STORES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for another store than Amazon's, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
}
"""Schemes of object stores, and the environment variables with their credentials."""
READABLE = {**STORES, "http": "", "https": "", "hf": "HF_TOKEN"}
"""Schemes of places from which files can be read."""
_QUERY = re.compile(r"[?&#][\w.-]+=")
"""A query, which may contain a signature; a "?" alone is a wildcard."""


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return URL.match(path) is not None


def check_local_path(field: str, value: str) -> str:
    """Return a path, or raise UserError if it is a URL."""
    return _refuse_url(field, value, path=value, supported="local paths")


def check_text_source(field: str, value: str) -> str:
    """Return a local path, a URL, or `hf:` with a name or directory; raise UserError for a URL that cannot be read."""
    if is_url(value):
        return _check_url(field, value, tuple(READABLE), "data are read from")
    return _refuse_url(field, value, path=value.removeprefix("hf:"), supported="local paths and hf:NAME")


def check_store(field: str, value: str) -> str:
    """Return the URL of a folder in an object store; raise UserError if it is none."""
    if not is_url(value):
        fix = "write a URL such as s3://BUCKET/FOLDER; for local checkpoints, remove it and set output_dir"
        raise UserError(field, value, "is not the URL of an object store", fix)
    return _check_url(field, value, tuple(STORES), "checkpoints are kept in").rstrip("/")


def _check_url(field: str, value: str, schemes: tuple[str, ...], purpose: str) -> str:
    """Return a URL of one of these schemes. Raises UserError for others, and for one that contains credentials."""
    scheme, rest = value.split("://", 1)
    if scheme == "file":
        return _refuse_url(field, value, path=value, supported="local paths")
    if scheme not in schemes:
        near = difflib.get_close_matches(scheme.lower(), schemes, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}://?" if near else "copy the files to one of these, or to a local disk"
        known = ", ".join(f"{name}://" for name in schemes)
        raise UserError(field, hide_credentials(value), f"has an unknown scheme: {purpose} {known}", fix)
    host = rest.partition("/")[0]
    if "@" in host or _QUERY.search(rest) or ("?" in rest and scheme.startswith("http")):
        problem = "has a user name, a password or a query, which would be recorded with the run"
        variables = READABLE[scheme] or "a store's own scheme, such as s3://"
        raise UserError(field, hide_credentials(value), problem, f"write the URL without them, and use {variables}")
    if not host:
        raise UserError(field, value, "names no bucket or host", f"write {scheme}://NAME/PATH")
    return value


def hide_credentials(text: str) -> str:
    """Return a text whose URLs have neither user names nor queries."""
    without_users = re.sub(r"(\w://)[^\s/@'\"]+@", r"\1", text)
    return re.sub(r"(\w://[^\s?'\"]*)\?[^\s'\"]+", r"\1", without_users)


def _refuse_url(field: str, value: str, *, path: str, supported: str) -> str:
    if match := URL.match(path):
        scheme, rest = match.groups()
        fix = f"write {rest!r}" if scheme.lower() == "file" else "mount or copy the files, and use their local path"
        raise UserError(field, hide_credentials(value), f"is a URL, but only {supported} are supported", fix)
    return value
