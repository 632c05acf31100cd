"""Training documents: plain stories and chats, drawn one by one from a seed, and their markup.

Document number i of a split depends on (split, seed, i) alone, so that a text can be drawn again without the ones
before it. A plain document is its text and END. A chat is, turn by turn, the role's token, the text and END; the
assistant speaks last.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tests.support.demo_model.answers import exchange
from tests.support.demo_model.stories import Length, Story

END = "<|end|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS: tuple[str, ...] = (PAD, END, SYSTEM, USER, ASSISTANT)

_SHARE_PLAIN = 0.3
_SHARE_STORY_REQUESTS = 0.55
_SHARE_SYSTEM = 0.1
_SHARE_MORE_TURNS = 0.12
_SYSTEM_MESSAGES = (
    "You are a friendly storyteller.",
    "You tell stories for children.",
    "You are a helpful assistant.",
    "Answer the user's question.",
    "You are Chairlift's demo model.",
)
_LENGTH_WORDS = {
    Length.SHORT: ("short ", "very short ", "little ", ""),
    Length.MEDIUM: ("", "", "nice ", "funny "),
    Length.LONG: ("long ", "very long ", "longer ", ""),
}
_ASKS = (
    "[Tell me|Write|Make up|Give me|Write me|Please tell me|Please write|Invent] a {length}story about {subject}.",
    "Can you [tell me|write|make up] a {length}story about {subject}?",
    "I would like [to hear|to read|] a {length}story about {subject}.",
    "[Do you know|Is there] a {length}story about {subject}?",
    "A {length}story about {subject}[, please|].",
    "Write a {length}[bedtime story|children's story|tale|fairy tale] about {subject}.",
)
_ASKS_FOR_ANYTHING = (
    "[Tell me|Write] a {length}story.",
    "Tell me a {length}[bedtime story|children's story|tale].",
    "Can you tell me a {length}story, please?",
)
_PLOTS_WITH_FRIEND = ("gift", "quarrel", "stranger", "stuck")
_PLOTS_WITHOUT_THING = ("build", "garden", "journey", "stuck")


class Role(Enum):
    """Who speaks; the value is the token that opens the turn."""

    SYSTEM = SYSTEM
    USER = USER
    ASSISTANT = ASSISTANT


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a chat."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """A plain text, or a chat: exactly one of the two is filled."""

    text: str = ""
    turns: tuple[Turn, ...] = ()

    def render(self) -> str:
        """The document with its special tokens, as the model reads it."""
        if not self.turns:
            return self.text + END
        return "".join(f"{turn.role.value}{turn.text}{END}" for turn in self.turns)

    def spoken(self) -> Iterator[str]:
        """The pieces of running text, without markup."""
        if self.turns:
            yield from (turn.text for turn in self.turns)
        else:
            yield self.text


def document(split: str, seed: int, index: int) -> Document:
    """Document number `index` of a split such as "train" or "held-out"."""
    rng = random.Random(f"{split}/{seed}/{index}")
    if rng.random() < _SHARE_PLAIN:
        return Document(text=Story.begin(rng).tell())
    return Document(turns=tuple(_chat(rng)))


def _chat(rng: random.Random) -> Iterator[Turn]:
    if rng.random() < _SHARE_SYSTEM:
        yield Turn(Role.SYSTEM, rng.choice(_SYSTEM_MESSAGES))
    num_exchanges = rng.choice((2, 2, 3)) if rng.random() < _SHARE_MORE_TURNS else 1
    for _ in range(num_exchanges):
        question, answer = story_exchange(rng) if rng.random() < _SHARE_STORY_REQUESTS else exchange(rng)
        yield Turn(Role.USER, question)
        yield Turn(Role.ASSISTANT, answer)


def story_exchange(rng: random.Random) -> tuple[str, str]:
    """A request for a story, and the story."""
    story = Story.begin(rng)
    return request(story), story.tell()


def request(story: Story) -> str:
    """A way to ask for this story: by its plot, its hero, both characters, or for any story at all."""
    draw = story.draw
    draw.bind("length", draw.pick(_LENGTH_WORDS[story.length]))
    if draw.chance(0.06):
        return " ".join(draw.one_of(_ASKS_FOR_ANYTHING).split())
    subjects = [story.title(), "a {H_trait} {H_kind}", "a {H_trait} {H_kind} [named|called] {H_name}", "a {H_kind}"]
    if story.length is not Length.SHORT or story.plot.name in _PLOTS_WITH_FRIEND:
        subjects += [
            "a {H_kind} and a {F_kind}",
            "{H_name} and {F_name}",
            "a {H_trait} {H_kind} and a {F_trait} {F_kind}",
        ]
    if story.plot.name not in _PLOTS_WITHOUT_THING:
        subjects += ["a {H_kind} and a {T_adj} {T}", "a {T_adj} {T}"]
    draw.bind("subject", draw.fill(draw.pick(subjects)))
    subject = str(draw.bound["subject"])
    if subject.startswith(("A ", "An ")):
        draw.bind("subject", subject[0].lower() + subject[1:])
    return " ".join(draw.one_of(_ASKS).split())
