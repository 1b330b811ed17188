"""Hooks of the documentation site (mkdocs.yml): links to files outside docs/, and examples in docstrings."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from griffe import Extension, Object

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files of the repository outside docs/ by their paths: the site has no such files."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def replacement(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = os.path.normpath(folder / target)
        if path.startswith(("docs/", "..")) or not (ROOT / path).exists():
            return match[0]
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return LINK.sub(replacement, markdown)


class DocstringExamples(Extension):
    """Read `Example:` in docstrings as the section `Examples:`, whose content is code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
