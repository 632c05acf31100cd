"""Grammars by llguidance: compiles a grammar to matchers, one per output."""

from collections.abc import Collection, Sequence

from llguidance import LLMatcher

from chairlift.service.structured.grammar_tokenizer import grammar_tokenizer
from chairlift.service.structured.parser_limits import parser_limits
from engine.constraints.token_bits import Words
from engine.errors import InvalidRequest

MAX_ERROR_CHARS = 500


class GrammarTokenizer:
    """llguidance's view of the tokenizer; created once."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, end_token_ids: Collection[int]) -> None:
        """Reads the tokenizer.

        Args:
            tokenizer_json: in the Hugging Face format.
            vocab_size: vocabulary of the model, which may be larger; no grammar allows the additional ids.
            end_token_ids: end tokens of the model; each of them may end the output of a complete grammar.
        Raises: InvalidRequest: the tokenizer cannot be used for grammars.
        """
        try:
            self.ll = grammar_tokenizer(tokenizer_json.decode(), vocab_size, end_token_ids)
        except ValueError as error:
            raise InvalidRequest(f"grammar: this model's tokenizer cannot be used: {_short(str(error))}") from error

    def bytes_of(self, token_id: int) -> bytes:
        """Returns what a token spells; special tokens spell their names."""
        return bytes(self.ll.decode_bytes([token_id]))


class GrammarMatcher:
    """State of one output in a grammar; implements `engine.constraints.constraint.Matcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @classmethod
    def compile(cls, grammar: str, tokenizer: GrammarTokenizer) -> "GrammarMatcher":
        """Compiles a grammar to a matcher at its start; takes about a millisecond without the GIL, seconds at worst.

        Args:
            grammar: in llguidance's JSON form, or Lark.
            tokenizer: tokenizer of the model.
        Raises: InvalidRequest: the grammar is invalid or too large.
        """
        matcher = LLMatcher(tokenizer.ll, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise InvalidRequest(f"grammar: {_short(matcher.get_error())}")
        return cls(matcher)

    def copy(self) -> "GrammarMatcher":
        """Returns a copy with the same state."""
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
        """See `Matcher`. Takes a millisecond at first, then mostly 10 to 50 us; without the GIL."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


def _short(error: str) -> str:
    """Returns the library's message without its debugging output."""
    text = " ".join(error.split("\n<state>")[0].split("<backtrace>")[0].replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
