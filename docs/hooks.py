"""Hooks of mkdocs: README is the first page; a link to a file that is no page becomes its name."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>[\w./-]+)(?:#[\w-]+)?\)")
NAMED_PAGE = re.compile(r"\bdocs/(?P<page>[\w/-]+)\.md(?P<anchor>#[\w-]+)?")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts README into index.md, and keeps the links that lead to other pages."""
    source = page.file.src_uri
    if source == "index.md":
        # As if README stood in docs/.
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        markdown = readme.replace("](", "](../").replace("](../docs/", "](")
        markdown = re.sub(r"\]\(\.\./(\w+:|#)", r"](\1", markdown)
    folder = posixpath.join("docs", posixpath.dirname(source))

    def kept(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        of_site = target.startswith("docs/") and not target.startswith("docs/examples")
        return link[0] if of_site and not (ROOT / target).is_dir() else link["text"]

    return LINK.sub(kept, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links the pages that docstrings name, such as docs/design/tail.md."""
    if not page.file.src_uri.startswith("api/"):
        return html
    up = posixpath.relpath(".", posixpath.dirname(page.file.dest_uri))

    def linked(name: re.Match[str]) -> str:
        return f'<a href="{up}/{name["page"]}/{name["anchor"] or ""}">{name[0]}</a>'

    return NAMED_PAGE.sub(linked, html)
