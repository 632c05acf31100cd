"""What one answer may go on with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.constraints.bad_sequences import BadSequences
from engine.constraints.token_bits import Words, all_words, remove, words_of


class Matcher(Protocol):
    """How far an answer has come in a grammar; `engine.constraints.grammar.GrammarMatcher` is one."""

    @property
    def error(self) -> str:
        """Why nothing can follow any more; empty as long as all is well."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these tokens."""
        ...

    def fill(self, words: Words) -> None:
        """Writes the set of tokens that may follow. An end token is among them where the answer may end."""
        ...


@dataclass(frozen=True, slots=True)
class HeldBackEnds:
    """What does not end an answer under a grammar while anything else can be drawn.

    A complete grammar allows nothing but an end token, so `min_tokens` and `ignore_end_token` end there. They are
    applied here and not as biases, which would leave a row without an allowed token.

    Attributes:
        token_ids: end and stop tokens, held back before `min_tokens` tokens.
        min_tokens: see above.
        always: the end tokens, if they are to be ignored: held back for ever.
    """

    token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    always: tuple[int, ...] = ()


class Constraint:
    """Allowed ids, forbidden sequences and a grammar of one request: what all of them allow may be drawn.

    It lives as long as its request, in and out of the batch. `accept` is told every token once and in order, those that
    came with the request included; whoever has fewer tokens in the answer than `num_accepted` says is out of date.

    Attributes:
        is_dynamic: whether what may be drawn depends on what was.
        num_accepted: tokens of the answer so far.
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
        """Nothing has been drawn yet.

        Args:
            vocab_size: of the model.
            allowed_ids: if not empty, only these are drawn.
            bad_sequences: each of one token at least.
            matcher: at the beginning of its grammar.
            ends: what the grammar does not end with too early.
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
        self._static: Words | None = None  # None: the matcher alone says what there is
        if allowed_ids or singles or matcher is None:
            self._static = words_of(allowed_ids, vocab_size) if allowed_ids else all_words(vocab_size)
            remove(self._static, singles)
        self._failure = ""
        self.is_dynamic = matcher is not None or bool(self._sequences)
        self.num_accepted = 0

    @property
    def error(self) -> str:
        """Why nothing can be drawn any more; empty as long as all is well."""
        return self._failure or (self._matcher.error if self._matcher is not None else "")

    def accept(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these tokens."""
        self.num_accepted += len(token_ids)
        if self._sequences:
            self._sequences.accept(token_ids)
        if self._matcher is not None:
            self._matcher.accept(token_ids)

    def fail(self, error: str) -> None:
        """The answer cannot go on."""
        self._failure = self._failure or error

    def fill(self, words: Words) -> None:
        """Writes the set of tokens that may be drawn next: none if there is an error.

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
