"""What a browser would see of a report's page."""

import re
from html.parser import HTMLParser

_VOID = {"br", "hr", "img", "input", "line", "link", "meta", "path", "rect", "stop", "use"}


class Page(HTMLParser):
    """A page whose tags match.

    Attributes:
        elements: tags with their attributes.
        text: what stands outside of styles, with single spaces.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._source = source
        self._words: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []
        self.text = re.sub(r"\s+", " ", " ".join(self._words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert tag in _VOID or self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self._words.append(data)

    def require_self_contained(self) -> None:
        """Fails unless nothing is loaded or run, ids differ, and what is referred to by id is there."""
        assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in self.elements}
        assert "@import" not in self._source
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        for _, attributes in self.elements:
            for name, value in attributes.items():
                assert not name.startswith("on"), name
                if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                    assert (value or "").startswith(("#", "data:image/")), (name, (value or "")[:80])
                if name == "aria-labelledby" or (name.endswith("href") and (value or "").startswith("#")):
                    assert (value or "").removeprefix("#") in ids
        assert set(re.findall(r"url\(#?([^)]*)\)", self._source)) <= set(ids)
