"""One answer of an OpenAI-compatible server, event by event: which carry tokens, how many, and what the server counts.

Pure: JSON in, calls of the Sink out. Events with only a role, with empty text or with usage alone are no tokens. A
message counts as many tokens as its `token_ids` hold; or, on a server that sends its usage with every message, as that
has grown; else as one. Where several tokens came in a message that did not say so, the usage at the end sets the
total right: it is kept beside the count.
"""

import json
from typing import Any

from loadgen.record import ABSENT
from loadgen.target.base import RequestFailedError, RequestRefusedError, Sink

INFEASIBLE = "targets_infeasible"
"""Error code of a refusal for latency targets."""

_TEXT_KEYS = ("content", "reasoning_content", "reasoning")
_GIVEN_UP = ("abort", "error")
"""Finish reasons of vLLM, SGLang and gateways for an answer that the server broke off: it is none."""
_MAX_ERROR_LENGTH = 200
_MAX_COUNT = 2**31 - 1  # as a record holds


class Answer:
    """The answer to one request.

    Args:
        sink: receives each event of the answer.
        counts_as_it_goes: the server was seen to send its usage with every message.
    """

    def __init__(self, sink: Sink, *, counts_as_it_goes: bool) -> None:
        self._sink = sink
        self._counts_as_it_goes = counts_as_it_goes
        self._num_tokens = 0
        self._usage: dict[str, Any] = {}
        self._is_over = False
        self.is_counted_as_it_goes = False
        """Whether a count of tokens came with a message that carries text and is not the last."""

    def take(self, data: bytes) -> None:
        """The data of one event.

        Raises:
            RequestRefusedError: the server found later that the request's targets cannot be met.
            RequestFailedError: it is another error, a finish reason that tells of one, not JSON, or JSON of another
                form.
        """
        if data == b"[DONE]":
            self._is_over = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise RequestFailedError(f"an event is not JSON: {data[:60]!r}") from None
        if not isinstance(event, dict):
            raise RequestFailedError(f"an event is not a JSON object: {data[:60]!r}")
        if event.get("error") or event.get("object") == "error":
            if error_code(event) == INFEASIBLE:
                raise RequestRefusedError(error_text(event), None, "")
            raise RequestFailedError(f"error in mid-answer: {error_text(event)}")
        usage = _object(event.get("usage"), "usage")
        choices = event.get("choices") or []
        if not isinstance(choices, list):
            raise RequestFailedError(f"choices is not a list: {str(choices)[:60]!r}")
        for first in choices[:1]:
            choice = _object(first, "choices[0]")
            count = self._new_tokens(choice, usage)
            if count > 0:
                self._num_tokens += count
                self._sink.tokens(count)
            finish_reason = choice.get("finish_reason")
            if finish_reason in _GIVEN_UP:
                raise RequestFailedError(f"error in mid-answer: the server ended it with finish_reason {finish_reason}")
            self._is_over |= bool(finish_reason)  # some servers send "" until the end
        if usage:
            self._usage = usage

    def end(self) -> None:
        """The stream is over: passes the server's own counts on.

        Raises: RequestFailedError: it ended before the answer did.
        """
        if not self._is_over:
            raise RequestFailedError("the stream broke off: neither a finish_reason nor [DONE] came")
        details = _object(self._usage.get("prompt_tokens_details"), "prompt_tokens_details")
        self._sink.started(_number(self._usage, "prompt_tokens"), _number(details, "cached_tokens"))
        self._sink.finished(_number(self._usage, "completion_tokens"))

    def _new_tokens(self, choice: dict[str, Any], usage: dict[str, Any]) -> int:
        delta = _object(choice.get("delta"), "delta")
        has_text = bool(choice.get("text") or any(delta.get(key) for key in _TEXT_KEYS) or delta.get("tool_calls"))
        if has_text and not choice.get("finish_reason") and _number(usage, "completion_tokens") > 0:
            self.is_counted_as_it_goes = True  # not by a count that stays at 0 until the end
        token_ids = choice.get("token_ids")
        if token_ids and isinstance(token_ids, list):
            return len(token_ids)
        if self._counts_as_it_goes and (counted := _number(usage, "completion_tokens")) != ABSENT:
            return counted - self._num_tokens
        return int(has_text)


def error_text(body: object) -> str:
    """What an error object of OpenAI's form, or of its relatives, says; cut to a line."""
    if isinstance(body, dict):
        inner = body.get("error") or body
        body = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(body).split())[:_MAX_ERROR_LENGTH]


def error_code(body: object) -> str:
    """Returns the code of an error object of OpenAI's form; "" if it has none."""
    inner = body.get("error") if isinstance(body, dict) else None
    return str(inner.get("code") or "") if isinstance(inner, dict) else ""


def _object(value: object, name: str) -> dict[str, Any]:
    """Returns an object of an event, empty if it is missing or null.

    Raises: RequestFailedError: it is something else.
    """
    if not value:
        return {}
    if not isinstance(value, dict):
        raise RequestFailedError(f"{name} is not a JSON object: {str(value)[:60]!r}")
    return value


def _number(counts: dict[str, Any], name: str) -> int:
    value = counts.get(name)
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else ABSENT
