"""Grammars by llguidance: a text and a tokenizer become matchers, one for each answer."""

from collections.abc import Collection, Sequence

from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits

from engine.constraints.token_bits import Words
from engine.errors import InvalidRequest

MAX_ERROR_CHARS = 500


def parser_limits() -> LLParserLimits:
    """What one grammar may cost. The library's measure of work is fuel: it burns 50 a microsecond when a grammar is
    compiled and 14 in a step.
    """
    return LLParserLimits(
        max_items_in_row=5_000,  # 1,200 optional members, 5,000 alternatives
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 14 ms
        step_max_items=50_000,  # 2.5 ms
        max_lexer_states=50_000,  # 1 to 2 KB each: 100 MB at most
        max_grammar_size=50_000,  # symbols; the library itself ends at 65,000
        precompute_large_lexemes=True,
        verbose_errors=False,  # the whole grammar and the parser's state, for whoever reads the log
    )


class GrammarTokenizer:
    """What llguidance must know of a tokenizer; to be made once."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, end_token_ids: Collection[int]) -> None:
        """Reads the tokenizer.

        Args:
            tokenizer_json: in the Hugging Face format.
            vocab_size: of the model, which may be larger: no grammar allows ids that no token has.
            end_token_ids: of the model: each that it can draw may end an answer whose grammar is complete.
        Raises: InvalidRequest: no grammar can be served with it.
        """
        ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
        if not ends:
            raise InvalidRequest("grammar: the model has no end token to end such an answer with")
        try:
            self.ll = LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=ends)
        except ValueError as error:
            raise InvalidRequest(f"grammar: this model's tokenizer cannot be used: {_short(str(error))}") from error


class GrammarMatcher:
    """How far an answer has come in a grammar; `engine.constraints.constraint.Matcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @classmethod
    def compile(cls, grammar: str, tokenizer: GrammarTokenizer) -> "GrammarMatcher":
        """A matcher at the beginning of a grammar. Takes a millisecond for most, without the GIL, and seconds at worst.

        Args:
            grammar: as llguidance takes it: its JSON form, or Lark.
            tokenizer: of the model.
        Raises: InvalidRequest: there is no such grammar, or it is too large.
        """
        matcher = LLMatcher(tokenizer.ll, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise InvalidRequest(f"grammar: {_short(matcher.get_error())}")
        return cls(matcher)

    def copy(self) -> "GrammarMatcher":
        """Another answer, as far as this one."""
        return GrammarMatcher(self._matcher.deep_copy())

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return f"grammar: {_short(self._matcher.get_error())}" if self._matcher.is_error() else ""

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher`."""
        for token_id in token_ids:  # consume_tokens() does not take an end token where nothing else could follow
            self._matcher.consume_token(token_id)

    def fill(self, words: Words) -> None:
        """See `Matcher`. A millisecond at first, then mostly 10 to 50 us; without the GIL."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


def _short(error: str) -> str:
    """The library's message without what it adds for its own developers."""
    text = " ".join(error.split("\n<state>")[0].split("<backtrace>")[0].replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
