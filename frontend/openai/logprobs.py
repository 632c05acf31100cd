"""Log-probabilities in OpenAI's two forms."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from chairlift.v1 import generation_service_pb2 as pb
from frontend.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own value."""


class _Candidate(NamedTuple):
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


class _Token(NamedTuple):
    chosen: _Candidate
    best: list[_Candidate]


def completion_logprobs(logprobs: pb.TokenLogprobs, tokenizer: Tokenizer, text_offset: int) -> dict[str, Any]:
    """The columns of /v1/completions.

    Args:
        text_offset: characters of the text before the first of these tokens.
    """
    tokens, offsets, tops = list(_tokens(logprobs, tokenizer)), [], []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token.chosen.text)
        top = {candidate.text: candidate.logprob for candidate in reversed(token.best)}  # of equal texts the best wins
        tops.append(top | {token.chosen.text: token.chosen.logprob} if token.best else None)
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": tops if logprobs.top_width else None,
        "text_offset": offsets,
    }


def chat_logprobs(logprobs: pb.TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """The rows of /v1/chat/completions."""
    rows = [
        _row(token.chosen) | {"top_logprobs": [_row(candidate) for candidate in token.best]}
        for token in _tokens(logprobs, tokenizer)
    ]
    return {"content": rows, "refusal": None}


def _row(candidate: _Candidate) -> dict[str, Any]:
    return {"token": candidate.text, "logprob": candidate.logprob, "bytes": list(candidate.data)}


def _tokens(logprobs: pb.TokenLogprobs, tokenizer: Tokenizer) -> Iterator[_Token]:
    width = logprobs.top_width
    for position, (data, value) in enumerate(zip(logprobs.chosen_bytes, logprobs.chosen, strict=True)):
        columns = slice(position * width, (position + 1) * width)
        best = [
            _Candidate(tokenizer.token_bytes(token_id), max(top, LOWEST))
            for token_id, top in zip(logprobs.top_ids[columns], logprobs.top_values[columns], strict=True)
        ]
        yield _Token(_Candidate(data, max(value, LOWEST)), best)
