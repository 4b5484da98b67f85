"""Hooks of the documentation site: pages from the repository's root, and links that leave docs/.

CONTRIBUTING.md, CHANGELOG.md and SECURITY.md become pages of the site. A link to another file of
the repository, which the site does not have, becomes plain text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "report-a-vulnerability.md",
}
"""Files of the root by the page that is made of them."""
_PAGES = {**FROM_ROOT, "README.md": "index.md"}
_CODE = r"(?P<code>^```.*?^```$|`[^`\n]*`)"
_INDEXED = re.compile(
    _CODE + r"|(?<=\w)\[(?P<i>[^\]\s]+)\]\[(?P<j>[^\]\s]+)\]", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(
    _CODE + r"|(?<!!)\[(?P<text>[^\]]*)\]\((?!https?:|#|mailto:)(?P<target>[^)#\s]+)"
    r"(?P<anchor>#[^)\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from files of the root."""
    from mkdocs.structure.files import File

    for source, page in FROM_ROOT.items():
        text = with_site_links((ROOT / source).read_text(encoding="utf-8"), "")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt the links of a page of docs/."""
    if page.file.src_uri in FROM_ROOT.values():
        return markdown
    return without_references(with_site_links(markdown, "docs"))


def without_references(text: str) -> str:
    r"""Return Markdown in which `a[i][j]` outside code is no link to a label `j`.

    >>> without_references("a[i][j] and `b[i][j]`")
    'a\\[i\\]\\[j\\] and `b[i][j]`'
    """
    return _INDEXED.sub(lambda m: m["code"] or rf"\[{m['i']}\]\[{m['j']}\]", text)


def with_site_links(text: str, folder: str) -> str:
    """Return Markdown of a file in `folder` with links that work on the site.

    >>> with_site_links("[a](docs/data.md#npz) [b](LICENSE)", "")
    '[a](data.md#npz) b'
    >>> with_site_links("[a](data.md) [b](../CHANGELOG.md)", "docs")
    '[a](data.md) [b](changelog.md)'
    """
    return _LINK.sub(lambda link: link["code"] or _site_link(link, folder), text)


def _site_link(link: re.Match[str], folder: str) -> str:
    path = normpath(str(PurePosixPath(folder) / link["target"]))
    inside = path.startswith("docs/") and "." in PurePosixPath(path).name  # a folder is no page
    page = _PAGES.get(path) or (path.removeprefix("docs/") if inside else None)
    return f"[{link['text']}]({page}{link['anchor'] or ''})" if page else link["text"]
