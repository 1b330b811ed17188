"""Hooks of the documentation site (mkdocs.yml): links out of docs/, mathematics, and examples in docstrings."""

from __future__ import annotations

import html
import importlib.resources
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from griffe import Extension, Object
from math_core import LatexToMathML
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


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


def on_files(files: Files, *, config: Any) -> Files:
    """Add the font of mathematics: few systems have one with stretched roots and brackets."""
    font = importlib.resources.files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf"
    files.append(File.generated(config, "stylesheets/STIXTwoMath-Regular.ttf", content=font.read_bytes()))
    return files


def on_page_content(page_html: str, **_: Any) -> str:
    """Replace TeX by MathML, which browsers show without scripts. Unknown TeX is an error."""
    mathml = LatexToMathML()

    def replacement(match: re.Match[str]) -> str:
        tag, tex = match.groups()
        formula = mathml.convert_with_local_state(html.unescape(tex), displaystyle=tag == "div")
        return f'<{tag} class="arithmatex">{formula}</{tag}>'

    return FORMULA.sub(replacement, page_html)


class DocstringExamples(Extension):
    """Read `Example:` in docstrings as the section `Examples:`, whose content is code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
