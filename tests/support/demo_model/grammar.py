"""A small template grammar: word lists, phrases and sentences with slots, drawn with a seeded generator.

`[a|b]` picks one alternative (they nest), `{name}` is a slot. A slot is looked up, in this order, among the values
bound for the document, the phrases and the word lists; `{Name}` is `{name}` with a capital where `Name` itself is
unknown. Words of one list are not repeated within a document before the list is used up. This module knows nothing
about stories.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

TEMPLATE_DIR: Path = Path(__file__).resolve().parent / "templates"

_TOKEN = re.compile(r"[\[\]|]|\{\w+\}|[^\[\]|{}]+")
_ARTICLE = re.compile(r"\b([Aa]) (?=(?:[aeiouAEIOU]|honest))")
_A_BEFORE_CONSONANT_SOUND = re.compile(r"\b([Aa])n (?=one\b|uni|use)")
_SENTENCE_START = re.compile(r"""(^"?|[.!?] |\n|\." |[.!?:] ")([a-z])""")


@dataclass(frozen=True, slots=True)
class Slot:
    """A name in braces."""

    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternatives in brackets."""

    options: tuple["Sequence", ...]


Sequence: TypeAlias = tuple["str | Slot | Choice", ...]


@cache
def parse_template(template: str) -> Sequence:
    """Parse one template.

    Raises: ValueError: a bracket is not closed or not opened.
    """
    tokens = [match.group() for match in _TOKEN.finditer(template)]
    if "".join(tokens) != template:
        raise ValueError(f"stray brace in template: {template!r}")
    sequence, end = _parse_sequence(tokens, 0, nested=False)
    if end != len(tokens):
        raise ValueError(f"unmatched bracket in template: {template!r}")
    return sequence


def _parse_sequence(tokens: list[str], start: int, *, nested: bool) -> tuple[Sequence, int]:
    parts: list[str | Slot | Choice] = []
    position = start
    while position < len(tokens):
        token = tokens[position]
        if token == "[":
            options: list[Sequence] = []
            while True:
                option, position = _parse_sequence(tokens, position + 1, nested=True)
                options.append(option)
                if position >= len(tokens):
                    raise ValueError(f"unclosed bracket after {''.join(tokens[:start])!r}")
                if tokens[position] == "]":
                    break
            parts.append(Choice(tuple(options)))
        elif token in ("|", "]") and nested:
            break
        elif token == "]":
            raise ValueError(f"unopened bracket in {''.join(tokens)!r}")
        elif token.startswith("{"):
            parts.append(Slot(token[1:-1]))
        else:
            parts.append(token)
        position += 1
    return tuple(parts), position


def polish(text: str) -> str:
    """Put `an` before vowels and a capital at the start of each sentence."""
    text = _ARTICLE.sub(r"\1n ", text)
    text = _A_BEFORE_CONSONANT_SOUND.sub(r"\1 ", text)
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def read_sections(path: Path) -> list[tuple[str, list[str]]]:
    """The sections of a grammar file in order: each `== HEAD` with the lines below it, comments left out."""
    sections: list[tuple[str, list[str]]] = []
    for raw in path.read_text(encoding="utf-8").splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("== "):
            sections.append((line[3:], []))
        else:
            sections[-1][1].append(line)
    return sections


@cache
def phrases() -> dict[str, tuple[str, ...]]:
    """Phrase name -> the ways to put it."""
    return {name: tuple(lines) for name, lines in read_sections(TEMPLATE_DIR / "phrases.txt")}


@cache
def words() -> dict[str, tuple[str, ...]]:
    """Word list name -> its words."""
    text = (TEMPLATE_DIR / "words.txt").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^#.*\n", "", text).replace("\n ", " ")
    lists: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        lists[name.strip()] = tuple(dict.fromkeys(word.strip() for word in rest.split(",") if word.strip()))
    return lists


@dataclass(slots=True)
class Draw:
    """The random draws of one document.

    Invariant: no word in `used[name]` is drawn from list `name` again until that list is exhausted.
    """

    rng: random.Random
    bound: dict[str, str | Callable[[], str]] = field(default_factory=dict)
    used: dict[str, set[str]] = field(default_factory=dict)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.rng.random() < probability

    def pick(self, options: Iterable[str]) -> str:
        """One of the options."""
        return self.rng.choice(tuple(options))

    def word(self, name: str) -> str:
        """A word of a list that this document has not used yet."""
        choices = words()[name]
        used = self.used.setdefault(name, set())
        if len(used) >= len(choices):
            used.clear()
        while (word := self.rng.choice(choices)) in used:
            pass
        used.add(word)
        return word

    def bind(self, name: str, value: str | Callable[[], str]) -> None:
        """Fix the value of a slot for the rest of the document."""
        self.bound[name] = value

    def bind_word(self, name: str, source: str) -> str:
        """Draw a word and fix it as the value of slot `name`."""
        value = self.word(source)
        self.bound[name] = value
        return value

    def fill(self, template: str) -> str:
        """The template with every choice made and every slot filled, articles and capitals put right."""
        return polish("".join(self._parts(parse_template(template))))

    def one_of(self, templates: Iterable[str]) -> str:
        """One of the templates, filled."""
        return self.fill(self.pick(templates))

    def _parts(self, sequence: Sequence) -> Iterator[str]:
        for part in sequence:
            if isinstance(part, str):
                yield part
            elif isinstance(part, Slot):
                yield self._slot(part.name)
            else:
                yield from self._parts(self.rng.choice(part.options))

    def _slot(self, name: str) -> str:
        value = self.bound.get(name)
        if value is not None:
            return value if isinstance(value, str) else value()
        if name in phrases():
            return "".join(self._parts(parse_template(self.rng.choice(phrases()[name]))))
        if name in words():
            return self.word(name)
        lowered = name[0].lower() + name[1:]
        if lowered == name:
            raise KeyError(f"unknown slot {name!r}")
        filled = self._slot(lowered)
        return filled[0].upper() + filled[1:]
