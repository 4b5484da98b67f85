"""Check the built documentation site: local links lead somewhere, and nothing is loaded elsewhere.

python tools/check_site.py site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Resources that a browser loads automatically, unlike the target of an `a`."""
_OUTSIDE = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//""")


class Page(HTMLParser):
    """The links, the loaded resources and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a tag refers to."""
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag in LOADED and values.get(LOADED[tag]):
            self.loaded.append(str(values[LOADED[tag]]))


def problems(site: Path) -> Iterator[str]:
    """Yield one line per broken link and per resource from a network."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site)
        if path.name == "404.html":  # its links are those of a server's root
            continue
        for url in page.loaded:
            if _is_outside(url) and not url.startswith("data:"):
                yield f"{name}: loads {url}"
        for url in [*page.links, *page.loaded]:
            if not _is_outside(url) and not _leads_somewhere(path, url, pages):
                yield f"{name}: {url} leads nowhere"
    for style in site.rglob("*.css"):
        if _OUTSIDE.search(style.read_text(encoding="utf-8")):
            yield f"{style.relative_to(site)}: loads something from a network"


def _is_outside(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.scheme or parts.netloc)


def _leads_somewhere(path: Path, url: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(url)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
    if target.is_dir():
        target /= "index.html"
    known = {page.resolve(): content for page, content in pages.items()}
    if target in known and parts.fragment:
        return unquote(parts.fragment) in known[target].anchors
    return target.is_file()


def main(site: Path) -> int:
    """Print what is wrong; return 1 if anything is."""
    if not (site / "index.html").is_file():
        print(f"{site}: has no index.html; build it with make docs-site")
        return 1
    lines = list(problems(site))
    print("\n".join(lines) or f"{site}: every link leads somewhere, nothing is loaded elsewhere")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
