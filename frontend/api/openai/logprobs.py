"""Log-probabilities in OpenAI's two formats, and those of prompts in vLLM's."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from chairlift.v1 import generation_service_pb2 as pb
from frontend.routing.logprobs import LOWEST
from frontend.slices import Sliced, at_once
from frontend.text.token_text import utf8_decoder
from frontend.text.tokenizer import Tokenizer

_YIELD_EVERY = 8  # tokens


class _Candidate(NamedTuple):
    data: bytes
    logprob: float
    shown_id: int | None = None  # in the place of its text

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace") if self.shown_id is None else _named(self.shown_id)


class _Token(NamedTuple):
    chosen: _Candidate
    best: list[_Candidate]


class TextOffsets:
    """Offsets of tokens in a text. A token that starts inside a character has the character's offset.

    Args:
        start: characters before the first token.

    Attributes:
        end: characters up to the end of the last token, without a character that is not complete.
    """

    def __init__(self, start: int = 0) -> None:
        self.end = start
        self._decoder = utf8_decoder()

    def add(self, data: bytes) -> int:
        """Adds the next token; returns its offset."""
        start = self.end
        self.end += len(self._decoder.decode(data))
        return start


def completion_logprobs(
    logprobs: pb.TokenLogprobs, tokenizer: Tokenizer, offsets: TextOffsets, token_ids: Sequence[int] | None = None
) -> Sliced[dict[str, Any]]:
    """Returns the columns of /v1/completions, in slices.

    Args:
        offsets: of the tokens before these.
        token_ids: of the tokens, which are then named by their ids; None: by their texts.
    """
    texts, values, tops, starts = [], [], [], []
    for number, token in enumerate(_tokens(logprobs, tokenizer, token_ids)):
        if number % _YIELD_EVERY == 0:
            yield
        texts.append(token.chosen.text)
        values.append(token.chosen.logprob)
        top = {candidate.text: candidate.logprob for candidate in reversed(token.best)}  # of equal texts the best wins
        tops.append(top | {token.chosen.text: token.chosen.logprob} if token.best else None)
        starts.append(offsets.add(token.chosen.data))
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops if logprobs.top_width else None,
        "text_offset": starts,
    }


def echo_logprobs(prompt: pb.PromptEcho, tokenizer: Tokenizer, text: str, *, by_id: bool) -> dict[str, Any]:
    """Returns the columns of a prompt in /v1/completions; its first token has no log-probability.

    Args:
        prompt: with its token ids.
        text: the prompt as it is echoed: special tokens that the tokenizer put before it have no place in it.
        by_id: name tokens by their ids.
    """
    offsets = TextOffsets()
    first = tokenizer.token_bytes(prompt.token_ids[0])
    starts = [offsets.add(first)]
    token_ids = prompt.token_ids[1:] if by_id else None
    columns = at_once(completion_logprobs(prompt.logprobs, tokenizer, offsets, token_ids))
    starts += columns["text_offset"]
    num_before = max(offsets.end - len(text), 0)
    return {
        "tokens": [_named(prompt.token_ids[0]) if by_id else first.decode(errors="replace"), *columns["tokens"]],
        "token_logprobs": [None, *columns["token_logprobs"]],
        "top_logprobs": [None, *columns["top_logprobs"]] if columns["top_logprobs"] is not None else None,
        "text_offset": [max(start - num_before, 0) for start in starts],
    }


def joined_columns(*parts: dict[str, Any] | None) -> dict[str, Any] | None:
    """Concatenates columns; None if there are none."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return {
        name: None if values is None else [value for part in present for value in part[name]]
        for name, values in present[0].items()
    }


class PromptRows:
    """Log-probabilities of a prompt in vLLM's format: for each token its candidates by id, the chosen one first; null
    for the first token. Rows are created during iteration: all at once, they would fill memory.

    The rank of a token outside the top candidates is unknown.

    Args:
        prompt: with its token ids.
        tokenizer: the model's.
    """

    def __init__(self, prompt: pb.PromptEcho, tokenizer: Tokenizer) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        yield None
        logprobs, width = self._prompt.logprobs, self._prompt.logprobs.top_width
        top_ids, top_values = list(logprobs.top_ids), list(logprobs.top_values)
        for index, (token_id, value) in enumerate(zip(self._prompt.token_ids[1:], logprobs.chosen, strict=True)):
            columns = slice(index * width, (index + 1) * width)
            row = {str(token_id): _ranked(self._tokenizer, token_id, value, None)}
            for rank, (top_id, top_value) in enumerate(
                zip(top_ids[columns], top_values[columns], strict=True), start=1
            ):
                row[str(top_id)] = _ranked(self._tokenizer, top_id, top_value, rank)
            yield row


def prompt_logprobs(prompt: pb.PromptEcho, tokenizer: Tokenizer) -> PromptRows | None:
    """Returns the rows of a prompt with token ids; None: the answer ended before they were computed."""
    return PromptRows(prompt, tokenizer) if prompt.HasField("logprobs") else None


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    text = tokenizer.token_bytes(token_id).decode(errors="replace")
    return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}


def chat_logprobs(
    logprobs: pb.TokenLogprobs, tokenizer: Tokenizer, token_ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns the rows of /v1/chat/completions."""
    return {"content": LogprobRows(logprobs, tokenizer, token_ids), "refusal": None}


class LogprobRows:
    """A row for each token of an answer. Like those of a prompt they are created during iteration.

    Args:
        logprobs: the answer's.
        tokenizer: the model's.
        token_ids: see `completion_logprobs`.
    """

    def __init__(
        self, logprobs: pb.TokenLogprobs, tokenizer: Tokenizer, token_ids: Sequence[int] | None = None
    ) -> None:
        self._logprobs = logprobs
        self._tokenizer = tokenizer
        self._token_ids = token_ids

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for token in _tokens(self._logprobs, self._tokenizer, self._token_ids):
            yield _row(token.chosen) | {"top_logprobs": [_row(candidate) for candidate in token.best]}


def _row(candidate: _Candidate) -> dict[str, Any]:
    return {"token": candidate.text, "logprob": candidate.logprob, "bytes": list(candidate.data)}


def _named(token_id: int) -> str:
    """Returns vLLM's name of a token id."""
    return f"token_id:{token_id}"


def _tokens(logprobs: pb.TokenLogprobs, tokenizer: Tokenizer, token_ids: Sequence[int] | None) -> Iterator[_Token]:
    width, top_ids, top_values = logprobs.top_width, logprobs.top_ids, logprobs.top_values
    for position, (data, value) in enumerate(zip(logprobs.chosen_bytes, logprobs.chosen, strict=True)):
        columns = slice(position * width, (position + 1) * width)
        best = [
            _Candidate(tokenizer.token_bytes(token_id), max(top, LOWEST), None if token_ids is None else token_id)
            for token_id, top in zip(top_ids[columns], top_values[columns], strict=True)
        ]
        shown_id = None if token_ids is None else token_ids[position]
        yield _Token(_Candidate(data, max(value, LOWEST), shown_id), best)
