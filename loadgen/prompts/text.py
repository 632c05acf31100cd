"""Prompts as text, for servers that take no token ids: words that are one token each, counted by the server itself.

Which words those are depends on the server's tokenizer, and so does what a template or a start token adds; both are
measured before the run, and how far a test prompt still misses its length is reported. Knows no tokenizer, no socket.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.errors import TargetError
from loadgen.prompts.token_ids import PromptMaker, Vocabulary
from loadgen.prompts.words import COMMON_WORDS
from loadgen.trace.schema import Accounting, Trace

CountTokens = Callable[[str], Awaitable[int]]
"""Tokens that the server makes of a prompt with this text, everything that it adds included."""

_ENOUGH_WORDS, _MIN_WORDS = 128, 32
_MAX_COUNTS = 300  # a count may be a request; 10 ms each make 3 s
_OPENING = "the"  # begins every text: without a space before it a word may be other tokens than elsewhere
_TEST_LENGTHS = (64, 200, 512)


@dataclass(frozen=True, slots=True)
class TextMeasure:
    """What text becomes at the server.

    Attributes:
        words: to make prompts of.
        overhead_tokens: what every prompt has besides its words: start token, chat template, the opening word.
        tokens_per_word: 1 where the words were found to be one token each, else their mean.
        mismatch: largest share by which a test prompt missed its length.
    """

    words: tuple[str, ...]
    overhead_tokens: int
    tokens_per_word: float
    mismatch: float = 0.0


class TextPromptMaker:
    """The prompts of one workload as words. Prompts share prefixes as in PromptMaker; a block is a number of words.

    Args:
        salt, workload: as PromptMaker's.
        measure: of the server.
    """

    def __init__(self, salt: str, workload: Trace, measure: TextMeasure) -> None:
        self._measure = measure
        self._words = np.array(measure.words, dtype=object)
        self._maker = PromptMaker(salt, workload, Vocabulary(len(measure.words)))

    def text(self, index: int) -> str:
        """The prompt of a request: input_tokens[index] tokens as the server counts, as nearly as words make it."""
        chosen = self._maker.token_ids(index)
        per_word = self._measure.tokens_per_word
        num_words = max(0, round((len(chosen) - self._measure.overhead_tokens) / per_word))
        if per_word > 1:  # skips positions by their index alone, so that shared prefixes stay shared
            places = np.floor(np.arange(len(chosen) + 1) / per_word)
            chosen = chosen[np.diff(places) > 0]
        return " ".join((_OPENING, *self._words[chosen[:num_words]]))


async def measure_text(count_tokens: CountTokens, max_model_len: int | None = None) -> TextMeasure:
    """Finds words that are one token each and what the server adds to a prompt.

    Args:
        count_tokens: asks the server.
        max_model_len: tokens that the server takes at most; None if it does not say.

    Method: group testing. A text of all words is counted; where it has too many tokens its halves are looked at (one is
    counted, the other's tokens are the rest), until there are enough words that are one token each, or too many counts
    were made. Without enough of them all words serve, and lengths are right on average only.

    Raises: TargetError: counts that no tokenizer gives; whatever count_tokens raises.
    """
    two, four = await count_tokens(" ".join([_OPENING] * 2)), await count_tokens(" ".join([_OPENING] * 4))
    if four <= two:
        raise TargetError(
            f"the server counts {two} tokens for a word given twice and {four} for it given four times: prompts of a "
            "known length cannot be made of text; use token ids if it takes them"
        )
    overhead = two - (four - two) // 2
    longest = max_model_len or 1 << 20
    words = COMMON_WORDS[: max(longest // 8, _MIN_WORDS)]  # words of 8 letters, each a token, still fit
    tokens = await count_tokens(" ".join((_OPENING, *words))) - overhead
    found: list[str] = []
    groups = [(words, tokens)]
    counts = 0
    while groups and len(found) < _ENOUGH_WORDS and counts < _MAX_COUNTS:
        group, group_tokens = groups.pop()
        if group_tokens == len(group):
            found += group
        elif len(group) > 1:
            first, second = group[: len(group) // 2], group[len(group) // 2 :]
            first_tokens = await count_tokens(" ".join((_OPENING, *first))) - overhead
            groups += [(second, group_tokens - first_tokens), (first, first_tokens)]
            counts += 1
    if len(found) >= _MIN_WORDS:
        measure = TextMeasure(tuple(found), overhead, 1.0)
    else:
        measure = TextMeasure(words, overhead, max(tokens / len(words), 1.0))
    lengths = [overhead + length for length in _TEST_LENGTHS if 2 * length < longest] or [longest // 2]
    return await _tested(measure, lengths, count_tokens)


async def _tested(measure: TextMeasure, lengths: Sequence[int], count_tokens: CountTokens) -> TextMeasure:
    maker = TextPromptMaker("test", _unshared(lengths), measure)
    counted = [await count_tokens(maker.text(index)) for index in range(len(lengths))]
    mismatch = max(abs(got - length) / length for got, length in zip(counted, lengths, strict=True))
    return TextMeasure(measure.words, measure.overhead_tokens, measure.tokens_per_word, mismatch)


def _unshared(lengths: Sequence[int]) -> Trace:
    """Requests of these lengths."""
    numbers, ones = np.arange(len(lengths)), np.ones(len(lengths), dtype=np.int64)
    return Trace(
        name="test prompts",
        format="made up",
        digest="",
        arrival_s=np.zeros(len(lengths)),
        input_tokens=np.array(lengths, dtype=np.int64),
        output_tokens=ones,
        rows=numbers,
        accounting=Accounting(len(lengths)),
    )
