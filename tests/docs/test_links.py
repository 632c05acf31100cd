"""Whatever the pages lead to is there: other pages, their headings, files, pictures. The web is not asked."""

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links

LINKS = [(page, line, target) for page in PAGES for line, target in links(page) if "://" not in target]


@pytest.mark.parametrize(("page", "line", "target"), LINKS, ids=[f"{page}:{line} {to}" for page, line, to in LINKS])
def test_leads_somewhere(page: str, line: int, target: str) -> None:
    path, _, anchor = target.partition("#")
    found = ((ROOT / page).parent / path).resolve() if path else ROOT / page
    assert found.exists()
    assert found.is_relative_to(ROOT)
    if anchor:
        assert anchor in anchors(str(found.relative_to(ROOT)))


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_every_page_can_be_found_from_the_front_door(page: str) -> None:
    assert page in [target.partition("#")[0] for _, target in links("README.md")]
