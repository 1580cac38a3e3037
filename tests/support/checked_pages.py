"""Pages as a browser sees them: whole, self-contained, with every tag closed in order."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "line", "rect", "path", "br"}


class Checker(HTMLParser):
    """Collects text, and notes tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.text = ""
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.problems.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(page: str) -> Checker:
    checked = Checker(page)
    assert checked.problems == []
    assert checked.open == []
    assert not checked.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|@import|url\(", page)
    assert "nan" not in re.findall(r'="([^"]*)"', page)
    return checked
