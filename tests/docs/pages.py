"""What a reader finds in the documentation: blocks, commands, code in sentences, links.

Knows what a page says and where, not whether it is true.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "engine/demo/model/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
PROGRAMS = (
    *("chairlift", "chairlift-engine", "chairlift-frontend", "chairlift-loadgen"),
    *("make", "python", "docker", "docker-compose", "curl", "grpcurl", "git", ".ci/run", "promtool"),
)
SHELLS = ("sh", "bash", "shell", "console")


@dataclass(frozen=True)
class Block:
    """A fenced or indented block; `line` is that of its first line of text, from 1."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        first = next((line.strip() for line in self.text.splitlines() if line.strip()), "")
        return f"{self.page}:{self.line} {self.language or 'text'} {first[:40]}".strip()


@dataclass(frozen=True)
class Command:
    """One command of a shell, with all of its lines; `setup`: the variables that its block has exported before."""

    page: str
    line: int
    text: str
    setup: str = ""
    output: str = ""  # what the page shows of it

    @property
    def words(self) -> list[str]:
        """As the shell splits it, from the program on, without comments; ours by their bare names."""
        words = shlex.split(self.text.replace("\\\n", " "), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):  # a variable for this command alone
            del words[0]
        return [word.removeprefix(".venv/bin/") for word in words]

    @property
    def plain(self) -> str:
        """In one line, for tables and names of tests."""
        return " ".join(self.words)

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.plain[:60]}"


@dataclass(frozen=True)
class Inline:
    """Code in a sentence or a table."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text[:60]}"


@cache
def tokens(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text(encoding="utf-8"))


def blocks(pages: list[str] = PAGES) -> Iterator[Block]:
    for page in pages:
        for token in tokens(page):
            if token.type in ("fence", "code_block") and token.map is not None:
                first = token.map[0] + (2 if token.type == "fence" else 1)
                yield Block(page, first, token.info.strip(), token.content)


def commands(block: Block) -> list[Command]:
    """Those of a shell's block, of a transcript (behind `$ `), or of a block with nothing else than programs in it."""
    lines = block.text.splitlines()
    if block.language in SHELLS and not any(line.startswith("$ ") for line in lines):
        return _commands(block, list(enumerate(lines, block.line)))
    if any(line.startswith("$ ") for line in lines):
        return [command for part in _prompts(block, lines) for command in part]
    found = [line.split()[0].removeprefix(".venv/bin/") for line in lines if line.strip()]
    if not block.language and all(word in PROGRAMS for word in found):
        return _commands(block, list(enumerate(lines, block.line)))
    return []


def _prompts(block: Block, lines: list[str]) -> Iterator[list[Command]]:
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        output = "\n".join(lines[start + 1 : end])
        yield _commands(block, [(block.line + start, lines[start][2:])], output)


def _commands(block: Block, lines: list[tuple[int, str]], output: str = "") -> list[Command]:
    found: list[Command] = []
    setup: list[str] = []
    while lines:
        number, text = lines.pop(0)
        while lines and _goes_on(text):
            text += "\n" + lines.pop(0)[1]
        if not shlex.split(text, comments=True):
            continue
        if text.startswith("export "):
            setup.append(text)
        else:
            found.append(Command(block.page, number, text.strip(), "\n".join(setup), output))
    return found


def _goes_on(text: str) -> bool:
    """Whether a command needs the next line too."""
    if text.endswith("\\"):
        return True
    document = re.search(r"<<-?\s*['\"]?(\w+)", text)
    if document is not None:
        return document[1] not in text.splitlines()[1:]
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quotation is open
        return True
    return False


def all_commands() -> list[Command]:
    return [command for block in blocks() for command in commands(block)]


def inline_code() -> Iterator[Inline]:
    for page in PAGES:
        for token in tokens(page):
            for child in token.children or ():
                if child.type == "code_inline":
                    yield Inline(page, (token.map or [0])[0] + 1, child.content)


def links(page: str) -> list[tuple[int, str]]:
    """(line, target) of links and pictures."""
    found = []
    for token in tokens(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                found.append(((token.map or [0])[0] + 1, str(target)))
    return found


def anchors(page: str) -> set[str]:
    """Names that links may end with, made as GitHub makes them of headings."""
    names: set[str] = set()
    for heading, inline in zip(tokens(page), tokens(page)[1:], strict=False):
        if heading.type == "heading_open":
            text = "".join(child.content for child in inline.children or () if child.type in ("text", "code_inline"))
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            number = 1
            while (unique := name if number == 1 else f"{name}-{number - 1}") in names:
                number += 1
            names.add(unique)
    return names
