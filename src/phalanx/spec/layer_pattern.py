"""Text that names the kinds of a model's layers in their order, such as "(window*5 full)*8"."""

from __future__ import annotations

import re

from phalanx.spec.errors import UserError

MAX_LAYERS = 10_000
_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|\d+|[()*])")


def parse_layers(text: str) -> list[str]:
    """Return the name of each layer's kind.

    `a b` is a layer of kind a and one of kind b, `a*3` are three layers, and `(a b)*2` is `a b a b`.

    Raises:
        UserError: The text has another form.
    """
    tokens: list[str] = []
    end = 0
    while match := _TOKEN.match(text, end):
        tokens.append(match[1])
        end = match.end()
    names = _parse_sequence(text, tokens, depth=0)
    if text[end:].strip() or tokens or not names:
        raise _error(text, "is not a list of kinds of layers")
    return names


def _parse_sequence(text: str, tokens: list[str], depth: int) -> list[str]:
    """Take the terms up to a closing parenthesis from `tokens`, and return their layers."""
    names: list[str] = []
    while tokens and tokens[0] != ")":
        term = tokens.pop(0)
        if term == "(":
            layers = _parse_sequence(text, tokens, depth + 1)
            if not tokens:
                raise _error(text, "lacks a closing parenthesis")
            tokens.pop(0)
        elif term[0].isalpha() or term[0] == "_":
            layers = [term]
        else:
            raise _error(text, f"has {term!r} where a kind of layers is expected")
        if tokens and tokens[0] == "*":
            tokens.pop(0)
            if not tokens or not tokens[0].isdigit():
                raise _error(text, "lacks a number after '*'")
            count = int(tokens.pop(0))
            if not 0 < count * len(layers) <= MAX_LAYERS:
                raise _error(text, f"has a number of layers that is not in 1 to {MAX_LAYERS:,}")
            layers = layers * count
        names += layers
    return names


def _error(text: str, problem: str) -> UserError:
    fix = 'use names and numbers, such as "dense*3 sparse*58" or "(window*5 full)*8"'
    return UserError("layers", text, problem, fix)
