"""What the fakes of other projects' engines answer: each token is a function of all tokens before it, so that an answer
continues in the same way wherever and whenever it is continued from prompt and output.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.frontend.byte_tokenizer import END_TOKEN_ID

_LETTERS = range(64, 90)


def next_token(token_ids: Sequence[int], *, may_end: bool) -> int:
    """The token after these; one in 40 ends the answer, where it may."""
    digest = hashlib.sha256(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)).digest()
    if may_end and digest[0] < 6:
        return END_TOKEN_ID
    return _LETTERS[digest[1] % len(_LETTERS)]


def logprob(token_id: int) -> float:
    """The log-probability of a token, representable in 32 bits."""
    return -(token_id % 16) / 8 - 0.25


@dataclass
class Request:
    """What a Generate call asks for, in one form for all protos."""

    message: Any
    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int]
    ignore_end: bool
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass
class Answer:
    """The tokens that one message reports."""

    new_ids: list[int]
    all_ids: list[int]
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    is_first: bool = False


def answer_to(
    prompt_ids: Sequence[int], max_tokens: int, *, ignore_end: bool = False, stop_token_ids: Sequence[int] = ()
) -> list[int]:
    """The tokens that an undisturbed engine generates."""
    token_ids = list(prompt_ids)
    answer: list[int] = []
    while len(answer) < max_tokens:
        answer.append(next_token(token_ids, may_end=not ignore_end))
        token_ids.append(answer[-1])
        if answer[-1] == END_TOKEN_ID or answer[-1] in stop_token_ids:
            break
    return answer
