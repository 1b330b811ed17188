"""Text that names the kinds of a model's layers in their order, such as "(window*5 full)*8"."""

from __future__ import annotations

import re
from itertools import groupby

from phalanx.spec.errors import UserError

MAX_LAYERS = 10_000
_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<open>\()|(?P<close>\))|\*\s*(?P<count>\d{1,5})(?!\w))")


def parse_layers(text: str) -> list[str]:
    """Return the name of each layer's kind.

    `a b` is a layer of kind a and one of kind b, `a*3` are three layers, and `(a b)*2` is `a b a b`.

    Raises:
        UserError: The text has another form.
    """
    # Terms of each open group: a term is a list of layers, which a count repeats.
    groups: list[list[list[str]]] = [[]]
    end = 0
    while match := _TOKEN.match(text, end):
        end = match.end()
        if match["name"]:
            groups[-1].append([match["name"]])
        elif match["open"]:
            groups.append([])
        elif match["close"]:
            if len(groups) == 1 or not groups[-1]:
                raise _error(text, "has a parenthesis that closes no group of layers")
            terms = groups.pop()
            groups[-1].append([name for term in terms for name in term])
        elif not groups[-1] or not 0 < int(match["count"]) * len(groups[-1][-1]) <= MAX_LAYERS:
            raise _error(text, f"repeats no layer, or more than {MAX_LAYERS:,} layers")
        else:
            groups[-1][-1] = groups[-1][-1] * int(match["count"])
    if text[end:].strip():
        raise _error(text, f"cannot be read from {text[end:].strip()[:20]!r} on")
    if len(groups) > 1:
        raise _error(text, "lacks a closing parenthesis")
    layers = [name for term in groups[0] for name in term]
    if not 0 < len(layers) <= MAX_LAYERS:
        raise _error(text, f"names no layers, or more than {MAX_LAYERS:,}")
    return layers


def write_layers(names: list[str]) -> str:
    """Return the text that names a kind for each layer, such as "window*5 full"."""
    runs = ((name, len(list(run))) for name, run in groupby(names))
    return " ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def _error(text: str, problem: str) -> UserError:
    fix = 'use names and numbers, such as "dense*3 sparse*58" or "(window*5 full)*8"'
    return UserError("layers", text, problem, fix)
