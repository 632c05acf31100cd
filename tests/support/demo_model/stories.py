"""Children's stories from the grammar: two characters, a plot, and as many sentences as the length asks for.

A story keeps its names, kinds, pronouns and objects from the first sentence to the last; everything else is drawn
afresh. It does not know how a story was asked for: `documents.py` puts requests before stories.
"""

import random
import re
from dataclasses import dataclass
from enum import Enum
from functools import cache

from tests.support.demo_model.grammar import TEMPLATE_DIR, Draw, read_sections, words

_MENTIONS_FRIEND = re.compile(r"\{F[_}]")
_PRONOUNS = {
    "she": {"they": "she", "them": "her", "their": "her", "theirs": "hers", "self": "herself"},
    "he": {"they": "he", "them": "him", "their": "his", "theirs": "his", "self": "himself"},
}
_SEASONS = ("spring", "summer", "autumn", "winter")


class Length(Enum):
    """How long a story is; the value is the highest level of beat it takes."""

    SHORT = 1
    MEDIUM = 2
    LONG = 3


# How many free sentences go between the beats of the plot, and after how many sentences a paragraph may end.
_NUM_INTERLUDES = {Length.SHORT: (0, 1), Length.MEDIUM: (1, 3), Length.LONG: (3, 6)}
_PARAGRAPH_SENTENCES = 5


@dataclass(frozen=True, slots=True)
class Beat:
    """One step of a plot: a level, and the ways to tell it. A beat without sentences is a meeting."""

    level: int
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot's name, what its stories can be called, and its beats in order."""

    name: str
    titles: tuple[str, ...]
    beats: tuple[Beat, ...]


@cache
def plots() -> tuple[Plot, ...]:
    """Every plot of the grammar, ordered by name."""
    meetings = tuple(read_sections(TEMPLATE_DIR / "meetings.txt")[0][1])
    result = []
    for path in sorted((TEMPLATE_DIR / "plots").glob("*.txt")):
        (_, titles), *sections = read_sections(path)
        beats = [
            Beat(int(head.split()[-1]), meetings if head.startswith("meet") else tuple(lines))
            for head, lines in sections
        ]
        result.append(Plot(path.stem, tuple(titles), tuple(beats)))
    return tuple(result)


@cache
def _sentences(file_name: str) -> tuple[str, ...]:
    return tuple(line for _, lines in read_sections(TEMPLATE_DIR / file_name) for line in lines)


@dataclass(slots=True)
class Story:
    """A story about to be told: its plot is chosen and its characters and things are bound in `draw`."""

    draw: Draw
    plot: Plot
    length: Length

    @classmethod
    def begin(cls, rng: random.Random, length: Length | None = None) -> "Story":
        """Choose a plot and cast its characters and things."""
        draw = Draw(rng)
        chosen = length or rng.choices(list(Length), weights=(35, 40, 25))[0]
        for role in ("H", "F"):
            _cast(draw, role)
        for name, source in (("T", "obj"), ("T_adj", "oadj"), ("stuck", "stuck")):
            draw.bind_word(name, source)
        for source in ("artifact", "plant", "contest", "fear", "sight"):
            draw.bind(source.capitalize(), draw.bind_word(source, source))
        season = draw.bind_word("season", "season")
        draw.bind("season_next", _SEASONS[(_SEASONS.index(season) + 1) % len(_SEASONS)])
        draw.bind("material_bare", draw.fill("{material_bare}").lower())
        return cls(draw, rng.choice(plots()), chosen)

    def title(self) -> str:
        """What the story is about, as a phrase that begins with a small letter."""
        title = self.draw.one_of(self.plot.titles)
        return title[0].lower() + title[1:]

    def tell(self) -> str:
        """The whole story."""
        sentences = [self.draw.one_of(_sentences("openings.txt"))]
        introduced = False
        beats = [beat for beat in self.plot.beats if beat.level <= self.length.value]
        breaks = self._interlude_positions(len(beats))
        for index, beat in enumerate(beats):
            sentence = self._choose(beat.sentences, introduced)
            if sentence is None:
                continue
            introduced = introduced or _introduces_friend(sentence)
            sentences.append(self.draw.fill(sentence))
            sentences.extend(self._interludes(breaks.count(index)))
        if self.draw.chance(0.85) or self.length is not Length.SHORT:
            ending = self._choose(_sentences("endings.txt"), introduced)
            assert ending is not None
            sentences.append(self.draw.fill(ending))
        return self._paragraphs(sentences)

    def _choose(self, templates: tuple[str, ...], introduced: bool) -> str | None:
        fitting = [
            line for line in templates if introduced or not _MENTIONS_FRIEND.search(line) or _introduces_friend(line)
        ]
        return self.draw.rng.choice(fitting) if fitting else None

    def _interlude_positions(self, num_beats: int) -> list[int]:
        count = self.draw.rng.randint(*_NUM_INTERLUDES[self.length])
        return [self.draw.rng.randrange(num_beats - 1) for _ in range(count)]

    def _interludes(self, count: int) -> list[str]:
        return [self.draw.one_of(_sentences("interludes.txt")) for _ in range(count)]

    def _paragraphs(self, sentences: list[str]) -> str:
        if self.length is Length.SHORT or self.draw.chance(0.4):
            return " ".join(sentences)
        size = self.draw.rng.randint(3, _PARAGRAPH_SENTENCES)
        return "\n\n".join(" ".join(sentences[start : start + size]) for start in range(0, len(sentences), size))


def _introduces_friend(template: str) -> bool:
    return all(slot in template for slot in ("{F_name}", "{F_trait}", "{F_kind}"))


def _cast(draw: Draw, role: str) -> None:
    """Bind the name, kind, trait, clothes and pronouns of a character."""
    gender = draw.pick(("she", "he"))
    kinds = "animals" if draw.chance(0.72) else f"{gender}_people"
    kind = draw.word(kinds)
    other = draw.bound.get("H_kind")
    while kind == other:
        kind = draw.word(kinds)
    name = draw.word(f"{gender}_names")
    draw.bind(f"{role}_name", name)
    draw.bind(f"{role}_kind", kind)
    draw.bind(f"{role}_trait", draw.word("trait"))
    draw.bind(f"{role}_wear", draw.word("wear"))
    draw.bind(role, lambda: name if draw.chance(0.75) else f"the {kind}")
    for slot, pronoun in _PRONOUNS[gender].items():
        draw.bind(f"{role}_{slot}", pronoun)
        draw.bind(f"{role}_{slot.capitalize()}", pronoun.capitalize())


def all_names() -> frozenset[str]:
    """Every first name that a character can have."""
    return frozenset(words()["she_names"]) | frozenset(words()["he_names"])
