"""The text of each token of a vocabulary. Built once per tokenizer and shared by all detokenizers.

The decoders of the `tokenizers` library need all ids at once. Two properties make exact streaming possible:

- Byte-level decoders (GPT-2, Llama 3, Qwen) map each token to bytes, independently of its neighbours: `ByteTokenText`.
- Others map each token to text that depends only on whether it is the first one and, for some decoders, whether it is
  the last one, or on its run of byte tokens: `PieceTokenText`. `TailRule` tells which of the latest tokens may still
  change.

With any other decoder, the text is decoded at the end of the answer: it appears late, but is correct.
"""

import codecs
import enum
import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TailRule(enum.Enum):
    """The latest tokens whose text may still change."""

    NONE = "none"
    BYTE_RUN = "byte run"  # one malformed byte turns its whole run of <0xAB> tokens into U+FFFD
    LAST = "last"  # an end-of-word suffix becomes a space only if another token follows
    ALL = "all"  # unknown decoder: any text may change until the end


def byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each character of byte-level BPE vocabularies encodes (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


def _tokens_by_id(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """Returns the token of every id; added tokens override the model's, as in the library."""
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    tokens.update({token_id: added.content for token_id, added in backend.get_added_tokens_decoder().items()})
    return tokens


def _special_ids(backend: tokenizers.Tokenizer, tokens: dict[int, str]) -> frozenset[int]:
    special = {added.content for added in backend.get_added_tokens_decoder().values() if added.special}
    return frozenset(token_id for token_id, token in tokens.items() if token in special)


class ByteTokenText:
    """Byte-level vocabulary: a table from id to bytes.

    Attributes:
        all_bytes: bytes of every id; empty for an id without a token.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        tokens = _tokens_by_id(backend)
        alphabet = byte_level_alphabet()
        self.all_bytes = [b""] * (max(tokens, default=-1) + 1)
        for token_id, token in tokens.items():
            try:
                self.all_bytes[token_id] = bytes([alphabet[char] for char in token])
            except KeyError:  # an added token with characters outside the alphabet is plain text
                self.all_bytes[token_id] = token.encode()
        without_special = list(self.all_bytes)
        for token_id in _special_ids(backend, tokens):
            without_special[token_id] = b""
        self._tables = {frozenset[int](): without_special}  # by marks, of which a model has few sets

    def table(self, *, keep_special_tokens: bool, marks: frozenset[int]) -> list[bytes]:
        """Returns the bytes of every id in an answer: empty for special tokens, unless they are kept or marks."""
        if keep_special_tokens:
            return self.all_bytes
        if marks not in self._tables:
            table = list(self._tables[frozenset()])
            for token_id in marks:
                table[token_id] = self.all_bytes[token_id]
            self._tables[marks] = table
        return self._tables[marks]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the raw bytes of one token; empty for an id without a token."""
        return self.all_bytes[token_id] if 0 <= token_id < len(self.all_bytes) else b""


class PieceTokenText:
    """Any other vocabulary: the text of a token between two neighbours, decoded by the library once per id.

    An anchor is a plain token that is placed before or after other tokens, so that they are neither first nor last; its
    own text is removed from the result.

    Attributes:
        tail_rule: the latest tokens whose text may still change.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tail_rule: TailRule) -> None:
        self._backend = backend
        self._tokens = _tokens_by_id(backend)
        self._special = _special_ids(backend, self._tokens)
        self._byte_of = {
            token_id: int(match[1], 16)
            for token_id, token in self._tokens.items()
            if (match := _BYTE_TOKEN.fullmatch(token)) is not None
        }
        self._pieces: dict[int, str] = {}  # at most one entry per id of the vocabulary
        self._anchor: list[int] = []
        self._left = self._right = ""
        self.tail_rule = tail_rule if self._find_anchor(plain=tail_rule is TailRule.LAST) else TailRule.ALL

    def _find_anchor(self, *, plain: bool) -> bool:
        """Finds a token that can be the anchor; `plain` requires that the library puts no space between two of them."""
        for token_id in self._tokens:
            if token_id in self._special or token_id in self._byte_of:
                continue
            left = self._decode([token_id])
            if not (left.isascii() and left.isalnum()):
                continue
            right = self._decode([token_id] * 2)[len(left) :]
            if (right == left if plain else right.strip() == left) and self._decode([token_id] * 3) == left + right * 2:
                self._anchor, self._left, self._right = [token_id], left, right
                return True
        return False

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def is_visible(self, token_id: int, *, keep_special_tokens: bool, marks: frozenset[int]) -> bool:
        """Returns whether the token has text in an answer: special tokens only if they are kept or marks."""
        is_kept = keep_special_tokens or token_id not in self._special or token_id in marks
        return is_kept and token_id in self._tokens

    def is_byte(self, token_id: int) -> bool:
        """Returns whether the token is a single byte, such as <0xE2>."""
        return token_id in self._byte_of

    def text_from_start(self, ids: Sequence[int]) -> str:
        """Returns the text of the first tokens of an answer if more follow; empty while it may still change."""
        text = self._decode([*ids, *self._anchor])
        return text.removesuffix(self._right) if text.endswith(self._right) else ""

    def text_between(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens that have others before and after them."""
        if len(ids) > 1:
            return self._decode([*self._anchor, *ids, *self._anchor])[len(self._left) : -len(self._right)]
        token_id = ids[0]
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._decode([*self._anchor, token_id, *self._anchor])[len(self._left) : -len(self._right)]
            self._pieces[token_id] = piece
        return piece

    def text_at_end(self, ids: Sequence[int], *, is_start: bool) -> str:
        """Returns the text of the last tokens; `is_start` if they are also the first."""
        if is_start:
            return self._decode(ids)
        return self._decode([*self._anchor, *ids])[len(self._left) :]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the raw bytes of one token in the middle of a text; empty for an id without a token."""
        if token_id not in self._tokens:
            return b""
        if token_id in self._byte_of:
            return bytes([self._byte_of[token_id]])
        return (self.text_between([token_id]) if self._anchor else self._tokens[token_id]).encode()


TokenText = ByteTokenText | PieceTokenText


def token_text(backend: tokenizers.Tokenizer) -> TokenText:
    """Returns the token texts for the decoder in tokenizer.json."""
    steps = _decoder_steps(json.loads(backend.to_str())["decoder"])
    kinds = [step["type"] for step in steps]
    if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
        return ByteTokenText(backend)
    return PieceTokenText(backend, _tail_rule(steps))


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the decoder as a flat list of steps; without steps, the library joins tokens with spaces."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
    return [decoder]


def _tail_rule(steps: list[dict[str, Any]]) -> TailRule:
    kinds = [step["type"] for step in steps]
    if kinds == ["BPEDecoder"]:
        return TailRule.LAST
    fuse = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    per_token = set(kinds[:fuse]) <= {"Replace", "ByteFallback", "Metaspace", "WordPiece", "Strip"}
    # After Fuse there is one string; stripping only its start does not change later text.
    whole = all(step["type"] == "Fuse" or (step["type"] == "Strip" and step["stop"] == 0) for step in steps[fuse:])
    if not (per_token and whole):
        return TailRule.ALL
    return TailRule.BYTE_RUN if "ByteFallback" in kinds else TailRule.NONE


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Returns a decoder that holds back incomplete characters; malformed bytes become U+FFFD, as in the library."""
    return codecs.getincrementaldecoder("utf-8")("replace")
