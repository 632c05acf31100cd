"""Incremental detokenization: the text so far is always a prefix of the full decoding of the same ids.

Only output ids are decoded, so text of the prompt cannot leak into the answer. The prompt decides one thing: some
decoders drop a leading space, which belongs to the answer if the answer continues other text.
`frontend/generation/answer/stop_texts.py` handles stop texts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from frontend.text.token_text import ByteTokenText, PieceTokenText, TailRule, TokenText, utf8_decoder

NO_MARKS = frozenset[int]()


class Detokenizer(Protocol):
    """Converts the tokens of one answer to text.

    Invariant: the returned strings together are a prefix of the tokenizer's decoding of the same ids, however the ids
    are chunked, and equal to it after `finish`. No returned string ends inside a character.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is final. An id without a token has no text."""
        ...

    def finish(self) -> str:
        """Returns the remaining text; an incomplete character becomes U+FFFD. No push may follow."""
        ...


def make_detokenizer(
    text: TokenText, *, keep_special_tokens: bool, marks: frozenset[int] = NO_MARKS, after: Sequence[int] = ()
) -> Detokenizer:
    """Returns a detokenizer for one answer.

    Args:
        keep_special_tokens: whether special tokens have text.
        marks: special tokens that have text in any case, because the answer's parser needs them.
        after: tokens whose text the answer continues; empty if it starts a text of its own.
    """
    if isinstance(text, ByteTokenText):
        return ByteLevelDetokenizer(text.table(keep_special_tokens=keep_special_tokens, marks=marks))
    is_visible = partial(text.is_visible, keep_special_tokens=keep_special_tokens, marks=marks)
    return PieceDetokenizer(text, is_visible, after)


class ByteLevelDetokenizer:
    """Byte-level BPE: looks up the bytes of each token and decodes UTF-8 incrementally.

    Args:
        table: bytes of each token.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = utf8_decoder()

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        table = self._table
        try:
            data = b"".join([table[token_id] for token_id in token_ids])
        except IndexError:  # the model may have more rows than the tokenizer has tokens
            data = b"".join([table[token_id] for token_id in token_ids if token_id < len(table)])
        return self._decoder.decode(data)

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """Any other vocabulary: holds tokens in a short window until later tokens cannot change their text.

    Args:
        text: texts of the tokens.
        is_visible: whether a token has text in the answer.
        after: see `make_detokenizer`.
    """

    def __init__(self, text: PieceTokenText, is_visible: Callable[[int], bool], after: Sequence[int]) -> None:
        self._text = text
        self._is_visible = is_visible
        self._window: list[int] = []  # visible tokens whose text is held back
        # The next token may lose a leading space.
        self._at_start = text.tail_rule is TailRule.ALL or not any(map(is_visible, after))

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        parts = []
        for token_id in token_ids:
            if self._is_visible(token_id):
                self._window.append(token_id)
                num_certain = self._num_certain(token_id)
                if num_certain:
                    parts.append(self._take(num_certain))
        return "".join(parts)

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        window, self._window = self._window, []
        return self._text.text_at_end(window, is_start=self._at_start) if window else ""

    def _num_certain(self, newest: int) -> int:
        """Returns the number of tokens in the window whose text is final; `newest` is its last token."""
        rule = self._text.tail_rule
        if rule is TailRule.ALL or (rule is TailRule.BYTE_RUN and self._text.is_byte(newest)):
            return 0
        return len(self._window) - (rule is TailRule.LAST)

    def _take(self, num_tokens: int) -> str:
        ids = self._window[:num_tokens]
        if self._at_start:
            text = self._text.text_from_start(ids)
            if not text:  # a leading space, whose effect depends on the next token
                return ""
            self._at_start = False
        else:
            text = self._text.text_between(ids)
        del self._window[:num_tokens]
        return text
