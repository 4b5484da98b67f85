"""Build HTML safely: text is escaped unless it has the type `Html`."""

from __future__ import annotations

import html
from collections.abc import Iterable

_EMPTY = frozenset({"meta", "link", "br", "path", "line", "rect", "circle", "use", "col"})


class Html(str):
    """A string that is HTML already and must not be escaped."""

    __slots__ = ()


Content = str | Iterable["Content"] | None
"""Text (escaped unless it is `Html`), or nested sequences of it; None is empty."""


def el(name: str, /, *inside: Content, **attributes: str | int | float | bool | None) -> Html:
    """Return an HTML or SVG element.

    Args:
        name: Tag name.
        inside: Content of the element.
        attributes: `class_` becomes class, other underscores become hyphens; True gives an
            attribute without a value, None and False give none.

    Example:
        >>> el("p", "a < b", class_="note")
        '<p class="note">a &lt; b</p>'
    """
    opened = f"<{name}{''.join(map(_attribute, attributes.items()))}"
    if name in _EMPTY:
        return Html(f"{opened}/>")
    return Html(f"{opened}>{join(inside)}</{name}>")


def join(parts: Content) -> Html:
    """Concatenate content, with plain text escaped."""
    if parts is None:
        return Html("")
    if isinstance(parts, Html):
        return parts
    if isinstance(parts, str):
        return Html(html.escape(parts, quote=False))
    return Html("".join(join(part) for part in parts))


def _attribute(item: tuple[str, str | int | float | bool | None]) -> str:
    key, value = item
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(str(value))}"'
