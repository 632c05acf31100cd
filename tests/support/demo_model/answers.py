"""Questions with their answers: facts of the story world, sums, counting, poems, lists and other short forms.

Each function returns one exchange, so that question and answer share what they speak of. Stories are in `stories.py`.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tests.support.demo_model.grammar import TEMPLATE_DIR, Draw, read_sections

_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_BOUND_WORDS = {
    "A": "animals", "C": "animals", "O": "obj", "t": "trait", "p": "padj", "L": "place", "w": "wadj", "F": "fadj",
    "B": "bakes", "pos": "pos",
}  # fmt: skip


class Exchange(NamedTuple):
    """What the user asks and what the assistant answers."""

    question: str
    answer: str


class _Topic(NamedTuple):
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]


@cache
def _topics(file_name: str) -> tuple[_Topic, ...]:
    topics = []
    for _, lines in read_sections(TEMPLATE_DIR / file_name):
        marked = {mark: tuple(line[2:] for line in lines if line.startswith(mark)) for mark in ("? ", "! ", "- ")}
        facts = tuple((left, right) for left, _, right in (fact.partition(": ") for fact in marked["- "]))
        topics.append(_Topic(marked["? "], marked["! "], facts))
    return tuple(topics)


def fact(rng: random.Random) -> Exchange:
    """A question from the tables of facts."""
    topic = rng.choice(_topics("facts.txt"))
    draw = Draw(rng)
    x, y = rng.choice(topic.facts)
    draw.bind("x", x)
    draw.bind("y", y)
    return Exchange(draw.one_of(topic.questions), draw.one_of(topic.answers))


def short_answer(rng: random.Random) -> Exchange:
    """A question that asks for a sentence, a list, a letter, a name and so on."""
    topic = rng.choice(_topics("answers.txt"))
    draw = Draw(rng)
    for slot, source in _BOUND_WORDS.items():
        draw.bind_word(slot, source)
    draw.bind_word("N", rng.choice(("she_names", "he_names")))
    draw.bind("season", draw.word("season"))
    return Exchange(draw.one_of(topic.questions), draw.one_of(topic.answers).replace("||", "\n"))


def poem(rng: random.Random) -> Exchange:
    """A rhyme of two to four couplets."""
    ((_, couplets),) = read_poems()
    draw = Draw(rng)
    draw.bind_word("A", "animals")
    trait = draw.bind_word("t", "trait")
    draw.bind("trait", trait)
    draw.bind("season", draw.word("season"))
    lines = [draw.fill(couplet).replace(" / ", "\n") for couplet in rng.sample(couplets, rng.randint(2, 4))]
    text = "\n".join(line[0].upper() + line[1:] for couplet in lines for line in couplet.split("\n"))
    question = draw.one_of(
        (
            "[Write|Make up|Recite] a [short|little|] poem about a {t} {A}.",
            "[Tell me|Give me|Write me] a rhyme about a {A}.",
            "Can you [write|make] a poem for a {t} {A}?",
            "I would like a poem about the {A}.",
        )
    )
    return Exchange(" ".join(question.split()), text)


@cache
def read_poems() -> tuple[tuple[str, list[str]], ...]:
    """The sections of the poem file."""
    return tuple(read_sections(TEMPLATE_DIR / "poems.txt"))


def arithmetic(rng: random.Random) -> Exchange:
    """A sum or a difference of numbers up to ten, in words or digits."""
    left, right = rng.randint(0, 10), rng.randint(0, 10)
    plus = rng.random() < 0.65
    left, right = (left, right) if plus else (max(left, right), min(left, right))
    result = left + right if plus else left - right
    sign, name = ("+", "plus") if plus else ("-", "minus")
    if rng.random() < 0.4:
        question = rng.choice(
            (f"What is {left} {sign} {right}?", f"{left} {sign} {right} = ?", f"Work out {left} {sign} {right}.")
        )
        answer = rng.choice((f"{left} {sign} {right} = {result}.", f"{result}.", f"That makes {result}."))
        return Exchange(question, answer)
    a, b, c = _NUMBERS[left], _NUMBERS[right], _NUMBERS[result]
    question = rng.choice(
        (f"What is {a} {name} {b}?", f"How much is {a} {name} {b}?", f"Work out {a} {name} {b}, please.")
    )
    return Exchange(question, rng.choice((f"{a.capitalize()} {name} {b} is {c}.", f"{c.capitalize()}.", f"It is {c}.")))


def counting(rng: random.Random) -> Exchange:
    """Counting up or down between two numbers."""
    start = rng.randint(1, 12)
    stop = start + rng.randint(2, 8)
    numbers = list(_NUMBERS[start : stop + 1])
    first, last = numbers[0], numbers[-1]
    if rng.random() < 0.25:
        numbers.reverse()
        first, last = last, first
    question = rng.choice((f"Count from {first} to {last}.", f"Can you count from {first} to {last}?"))
    text = ", ".join(numbers)
    return Exchange(question, f"{text[0].upper()}{text[1:]}.")


def animal_list(rng: random.Random) -> Exchange:
    """A list of a few words of one sort."""
    draw = Draw(rng)
    count = rng.randint(2, 5)
    asked, source = rng.choice(
        (
            ("animals", "animals"), ("names", "she_names"), ("foods", "food"), ("colours", "hue"), ("places", "place"),
            ("things that fit in a bag", "obj"), ("small creatures", "creature"), ("tastes", "taste"),
            ("plants", "plant"),
        )
    )  # fmt: skip
    items = [draw.word(source) for _ in range(count)]
    if source in ("animals", "creature", "place", "plant", "obj") and rng.random() < 0.6:
        items = [f"a {item}" for item in items]
    question = rng.choice(
        (
            f"Name {_NUMBERS[count]} {asked}.",
            f"List {_NUMBERS[count]} {asked}.",
            f"Can you name {_NUMBERS[count]} {asked}?",
        )
    )
    return Exchange(question, draw.fill(", ".join(items[:-1]) + f" and {items[-1]}."))


_MAKERS: tuple[tuple[Callable[[random.Random], Exchange], int], ...] = (
    (fact, 32),
    (short_answer, 44),
    (poem, 12),
    (arithmetic, 6),
    (counting, 3),
    (animal_list, 6),
)


def exchange(rng: random.Random) -> Exchange:
    """Any question with its answer, in the proportions of the training text."""
    makers, weights = zip(*_MAKERS, strict=True)
    maker: Callable[[random.Random], Exchange] = rng.choices(makers, weights=weights)[0]
    return maker(rng)
