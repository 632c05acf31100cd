import json
from typing import Any

import pytest

from loadgen.record import ABSENT
from loadgen.target.base import RequestFailedError
from loadgen.target.openai_answer import Answer, error_text
from loadgen.target.probe import Tally


class Counts(Tally):
    """A Sink that keeps each count."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def tokens(self, count: int) -> None:
        self.counts.append(count)


def take(*events: dict[str, Any] | bytes, counts_as_it_goes: bool = False) -> tuple[Counts, Answer]:
    sink = Counts()
    answer = Answer(sink, counts_as_it_goes=counts_as_it_goes)
    for event in events:
        answer.take(event if isinstance(event, bytes) else json.dumps(event).encode())
    answer.end()
    return sink, answer


def text(content: str, finish_reason: str | None = None, **others: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}], **others}


def delta(finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish_reason}]}


def test_role_only_and_empty_messages_are_no_tokens() -> None:
    sink, _ = take(
        delta(role="assistant", content=""),
        delta(content="a"),
        delta(),
        delta(content=None),
        delta("stop", content="b"),
    )
    assert sink.counts == [1, 1]


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning"])
def test_thinking_and_tool_calls_are_tokens_too(key: str) -> None:
    sink, _ = take(delta(**{key: "hm"}), delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), b"[DONE]")
    assert sink.counts == [1, 1]


def test_ids_in_a_message_are_counted_even_without_text() -> None:
    event = text("")
    event["choices"][0]["token_ids"] = [5, 6, 7]
    sink, _ = take(event, text("x", "length"))
    assert sink.counts == [3, 1]


def test_usage_that_grows_with_the_messages_counts_them() -> None:
    events = [text("", usage={"completion_tokens": 0}), text("a", usage={"completion_tokens": 1})]
    events += [text("", usage={"completion_tokens": 2}), text("bcd", "length", usage={"completion_tokens": 5})]
    sink, answer = take(*events, counts_as_it_goes=True)
    assert sink.counts == [1, 1, 3]
    assert answer.is_counted_as_it_goes
    assert sink.num_counted_tokens == 5


def test_usage_of_the_last_message_alone_counts_no_message() -> None:
    sink, answer = take(text("a"), text("b"), text("c", "length", usage={"completion_tokens": 9}))
    assert sink.counts == [1, 1, 1]
    assert not answer.is_counted_as_it_goes
    assert sink.num_counted_tokens == 9


def test_a_count_that_stays_at_zero_until_the_end_counts_nothing_as_it_goes() -> None:
    """Else the first token of later answers would seem to come with the last message."""
    zero = {"prompt_tokens": 8, "completion_tokens": 0}
    events = (text("a", usage=zero), text("b", usage=zero), text("c", "length", usage={**zero, "completion_tokens": 3}))
    sink, answer = take(*events)
    assert sink.counts == [1, 1, 1]
    assert not answer.is_counted_as_it_goes


@pytest.mark.parametrize("counted", [None, "3", True, -1, 2**31])
def test_counts_that_are_no_numbers_are_no_counts(counted: object) -> None:
    sink, _ = take(text("a", usage={"completion_tokens": counted}), b"[DONE]", counts_as_it_goes=True)
    assert (sink.counts, sink.num_counted_tokens) == ([1], ABSENT)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, (ABSENT, ABSENT, ABSENT)),
        ({"prompt_tokens": 7, "completion_tokens": 2}, (7, ABSENT, 2)),
        ({"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}, (7, ABSENT, 2)),
        ({"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}, (7, 3, 2)),
    ],
)
def test_the_servers_counts_are_passed_on(usage: dict[str, Any] | None, counts: tuple[int, int, int]) -> None:
    sink, _ = take(text("a", usage=None), text("b", "length"), {"choices": [], "usage": usage}, b"[DONE]")
    assert (sink.num_input_tokens, sink.num_cached_tokens, sink.num_counted_tokens) == counts


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([text("a")], "broke off"),
        ([text("a", "")], "broke off"),
        ([], "broke off"),
        ([b"<html>"], "not JSON"),
        ([b"7"], "not a JSON object"),
        ([text("a"), {"error": {"message": "out of\nmemory", "code": 500}}], "mid-answer: out of memory"),
        ([text("a"), {"error": "plain words"}], "mid-answer: plain words"),
        ([text("a"), {"object": "error", "message": "out of memory"}, b"[DONE]"], "mid-answer: out of memory"),
        ([text("a"), text("", "abort"), b"[DONE]"], "mid-answer: the server ended it with finish_reason abort"),
        ([delta(content="a"), delta("error"), b"[DONE]"], "finish_reason error"),
        ([{"choices": "x"}], "choices is not a list: 'x'"),
        ([{"choices": {"0": {}}}], "choices is not a list"),
        ([{"choices": ["x"]}], r"choices\[0\] is not a JSON object: 'x'"),
        ([{"choices": [{"delta": "x"}]}], "delta is not a JSON object: 'x'"),
        ([text("a", usage=[3])], "usage is not a JSON object"),
        ([text("a", "stop", usage={"prompt_tokens_details": 3})], "prompt_tokens_details is not a JSON object"),
    ],
)
def test_an_answer_that_is_none_fails(events: list[dict[str, Any] | bytes], complaint: str) -> None:
    with pytest.raises(RequestFailedError, match=complaint):
        take(*events)


def test_error_texts_are_found_and_cut() -> None:
    assert error_text({"error": {"message": "no"}}) == "no"
    assert error_text({"message": "vLLM's older form"}) == "vLLM's older form"
    assert error_text({"detail": "something"}) == "{'detail': 'something'}"
    assert len(error_text("x" * 1000)) == 200
