"""Drafts: tokens that a request may generate next, guessed from its own text and verified by the model in one step.

The guess is what followed the last tokens when they occurred before ("Inference with Reference", arXiv:2304.04487,
known as prompt lookup). It costs no second model and pays where answers copy: code edits, summaries, extraction, loops.
Verification is exact, unlike that of speculative sampling (arXiv:2211.17192), which keeps the distribution only: a draw
depends on logits, seed and position, so that each drafted position draws the token that it would draw alone.

This module knows no steps, blocks or budgets; `draft_scheduler.py` does.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.request import Request

_TOKEN_BYTES = array("i").itemsize
_MAX_WAIT = 31
_MAX_MISALIGNED = 256  # byte matches that begin inside a token; bounds the cost of a lookup


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How to guess; names are those of vLLM.

    Attributes:
        num_speculative_tokens: most tokens of a draft.
        prompt_lookup_max, prompt_lookup_min: most and fewest last tokens that are looked up; the longest match counts.
    """

    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


class PromptLookup:
    """Guesses the next tokens of one request.

    The length of drafts adapts like a congestion window: it doubles when a whole draft was right, and shrinks to what
    was right otherwise. After a draft of which nothing was right, the request decodes 1, 3, 7, ... 31 tokens without
    one, so that text which only seems to repeat costs little.

    Tokens are kept packed, 4 bytes each. A lookup that finds nothing takes 7 us with 8,000 tokens and 0.15 ms with
    100,000 on one core of an AMD EPYC. A dictionary of n-grams would be fast at any length, but take a hundred bytes a
    token.
    """

    __slots__ = ("_length", "_limits", "_num_misses", "_packed", "_resumes_at")

    def __init__(self, limits: DraftLimits) -> None:
        self._limits = limits
        self._packed = bytearray()
        self._length = limits.num_speculative_tokens
        self._num_misses = 0  # drafts in sequence of which nothing was right
        self._resumes_at = 0  # number of tokens from which on it guesses again

    def propose(self, request: Request, max_drafts: int) -> tuple[int, ...]:
        """Returns a draft of at most `max_drafts` tokens, often none.

        Args:
            request: the same one in every call; meanwhile tokens may only have been appended.
            max_drafts: a limit besides the request's own.
        """
        num_tokens = request.num_tokens
        num_drafts = min(max_drafts, self._length)
        if num_drafts <= 0 or num_tokens < self._resumes_at:
            return ()
        packed = self._packed
        packed += array("i", request.token_ids(len(packed) // _TOKEN_BYTES, num_tokens)).tobytes()
        start = self._find_continuation()
        if start is None:
            return ()
        copied = array("i")
        copied.frombytes(packed[start : start + num_drafts * _TOKEN_BYTES])
        # A text that repeats itself up to its end goes on repeating: the copy reads the tokens that it has appended.
        return tuple((copied * -(-num_drafts // len(copied)))[:num_drafts])

    def learn(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Adapts to the result of a draft.

        Args:
            num_drafts: its tokens.
            num_accepted: those that were right.
            num_tokens: tokens of the request afterwards.
        """
        if num_accepted == num_drafts:
            self._length = min(2 * self._length, self._limits.num_speculative_tokens)
        else:
            self._length = max(1, num_accepted)
        self._num_misses = 0 if num_accepted else self._num_misses + 1
        self._resumes_at = num_tokens + min(2**self._num_misses - 1, _MAX_WAIT)

    def _find_continuation(self) -> int | None:
        """Returns the offset of what followed the longest of the looked-up suffixes when it occurred last; None: none.

        All lengths together search the text once, backwards: a longer suffix last occurred no later than a shorter one.
        A suffix counts as not found after `_MAX_MISALIGNED` matches that begin inside a token.
        """
        packed = self._packed
        found, stop = None, len(packed) - _TOKEN_BYTES  # an occurrence must have a continuation
        for num_tokens in range(self._limits.prompt_lookup_min, self._limits.prompt_lookup_max + 1):
            suffix = packed[-num_tokens * _TOKEN_BYTES :]
            start = packed.rfind(suffix, 0, stop)
            for _ in range(_MAX_MISALIGNED):
                if start < 0 or start % _TOKEN_BYTES == 0:
                    break
                start = packed.rfind(suffix, 0, start + len(suffix) - 1)  # bytes of neighbours looked like the suffix
            if start < 0 or start % _TOKEN_BYTES:
                break
            found = stop = start + len(suffix)
        return found


def confirmed(draft_ids: Sequence[int], drawn_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that decoding one by one would have yielded.

    Args:
        draft_ids: a draft.
        drawn_ids: [1 + len(draft_ids)], drawn before the draft and behind each of its tokens; -1 where that failed.
    Returns: the drawn tokens up to and including the first that differs from the draft. A failed draw ends them too:
        the next row meets it again as its first one. If the first one failed, there are none.
    """
    num_equal = 0
    for draft_id, drawn_id in zip(draft_ids, drawn_ids, strict=False):
        if draft_id != drawn_id:
            break
        num_equal += 1
    tokens = tuple(drawn_ids[: num_equal + 1])
    return tokens if tokens[-1] >= 0 else tokens[:-1]
