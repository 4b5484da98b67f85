"""A Griffe extension: doctests of the API reference are shown as code, wherever they stand."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^(?P<indent> *)>>> .*\n?(?:^(?P=indent)\S.*\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = with_code_blocks(obj.docstring.value)


def with_code_blocks(text: str) -> str:
    """Return a docstring whose doctests are a Google section or fenced."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    before, section, examples = text.partition("\nExamples:\n")
    return _DOCTEST.sub(_fenced, before) + section + examples


def _fenced(match: re.Match[str]) -> str:
    indent, code = match["indent"], match[0].rstrip("\n")
    return f"{indent}```pycon\n{code}\n{indent}```\n"
