"""The structured-output constraint of one request."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.constraints.bad_sequences import BadSequences
from engine.constraints.token_bits import Words, all_words, remove, words_of


class Matcher(Protocol):
    """State of one output in a grammar; implemented by `engine.constraints.grammar.GrammarMatcher`."""

    @property
    def error(self) -> str:
        """Why no token is allowed any more; empty if there is no error."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the output."""
        ...

    def fill(self, words: Words) -> None:
        """Writes the set of allowed tokens, including an end token where the output may end."""
        ...


@dataclass(frozen=True, slots=True)
class HeldBackEnds:
    """What does not end an answer under a grammar while anything else can be drawn.

    A complete grammar allows nothing but an end token, so `min_tokens` and `ignore_end_token` end there. They are
    applied here and not as biases, which would leave a row without an allowed token.

    Attributes:
        token_ids: end and stop tokens, held back before `min_tokens` tokens.
        min_tokens: see above.
        always: the end tokens, if they are to be ignored: held back for the whole answer.
    """

    token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    always: tuple[int, ...] = ()


class Constraint:
    """Allowed ids, forbidden sequences and the grammar of one request; a token must be allowed by all of them.

    It lives as long as its request, in and out of the batch. `accept` gets every output token once and in order,
    including prior output tokens.

    Attributes:
        is_dynamic: whether the allowed tokens depend on the output.
        num_accepted: output tokens so far.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed_ids: Sequence[int] = (),
        bad_sequences: Iterable[Sequence[int]] = (),
        matcher: Matcher | None = None,
        ends: HeldBackEnds | None = None,
    ) -> None:
        """Creates the constraint of an empty output.

        Args:
            vocab_size: vocabulary of the model.
            allowed_ids: if not empty, only these are drawn.
            bad_sequences: forbidden sequences of at least one token.
            matcher: matcher at the start of its grammar.
            ends: end tokens to mask.
        """
        bad_sequences = list(bad_sequences)
        self._matcher = matcher
        ends = ends or HeldBackEnds()
        self._min_tokens = ends.min_tokens
        # Each takes a tenth of a millisecond for a large vocabulary, and few requests need one.
        self._all_but_ends = ~words_of(ends.token_ids, vocab_size) if ends.min_tokens else None
        self._all_but_ignored = ~words_of(ends.always, vocab_size) if ends.always else None
        self._sequences = BadSequences(bad_sequences)
        singles = [sequence[0] for sequence in bad_sequences if len(sequence) == 1]
        self._static: Words | None = None  # None: only the matcher decides
        if allowed_ids or singles or matcher is None:
            self._static = words_of(allowed_ids, vocab_size) if allowed_ids else all_words(vocab_size)
            remove(self._static, singles)
        self._failure = ""
        self.is_dynamic = matcher is not None or bool(self._sequences)
        self.num_accepted = 0

    @property
    def error(self) -> str:
        """Why no token can be drawn any more; empty if there is no error."""
        return self._failure or (self._matcher.error if self._matcher is not None else "")

    def accept(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the output."""
        self.num_accepted += len(token_ids)
        if self._sequences:
            self._sequences.accept(token_ids)
        if self._matcher is not None:
            self._matcher.accept(token_ids)

    def fail(self, error: str) -> None:
        """Marks the constraint as failed; the first error is kept."""
        self._failure = self._failure or error

    def fill(self, words: Words) -> None:
        """Writes the set of tokens that may be drawn next; empty after an error.

        Args:
            words: [num_words], overwritten.
        """
        if self._matcher is not None:
            self._matcher.fill(words)
            if self._static is not None:
                words &= self._static
        elif self._static is not None:
            words[:] = self._static
        if self._sequences:
            remove(words, self._sequences.forbidden_ids())
        if self._matcher is not None:
            self._hold_back_ends(words)
        if self.error:
            words[:] = 0

    def _hold_back_ends(self, words: Words) -> None:
        held_back = self.num_accepted < self._min_tokens
        others = self._all_but_ends if held_back else self._all_but_ignored
        if others is not None and (others := words & others).any():
            words[:] = others
