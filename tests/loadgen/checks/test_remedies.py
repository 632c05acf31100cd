"""The advice fits the cause: a lower rate only where load was the trouble."""

import pytest

from loadgen.checks.remedies import remedy
from loadgen.record import Status
from tests.support.loadgen.runs import Answered, run_of


def _failed(error: str, *, status: Status = Status.ERROR, **more: int) -> Answered:
    return Answered(0.0, status=status, ended_s=1.0, error=error, **more)


@pytest.mark.parametrize(
    ("error", "advice", "rate_helps"),
    [
        ("INVALID_ARGUMENT: bad", "refuses such requests at any rate", False),
        ("HTTP 422: bad", "refuses such requests at any rate", False),
        ("RESOURCE_EXHAUSTED: 512 wait", "its queue is full", True),
        ("HTTP 429: slow down", "its queue is full", True),
        ("UNAVAILABLE: no engine", "was away", False),
        ("ServerDisconnectedError: gone", "was away", False),
        ("UNAUTHENTICATED: who are you", "CHAIRLIFT_API_KEY", False),
        ("HTTP 401: who are you", "OPENAI_API_KEY", False),
        ("HTTP 404: no such model", "--model", False),
        ("INTERNAL: oops", "the server failed", False),
        ("worker 1 died with exit code -9", "see why", False),
    ],
)
def test_each_kind_of_error_has_its_own(error: str, advice: str, rate_helps: bool) -> None:
    found = remedy(run_of([_failed(error)]), 0)
    assert advice in found
    assert ("lower the rate" in found) == rate_helps


def test_the_most_frequent_cause_decides() -> None:
    run = run_of([_failed("INTERNAL: oops"), _failed("HTTP 429: 1 waiting"), _failed("HTTP 429: 2 waiting")])
    assert "its queue is full" in remedy(run, 0)


def test_refusals_for_latency_targets_are_no_cause_of_errors() -> None:
    refused = _failed("RESOURCE_EXHAUSTED: the first token would come after 3 s", status=Status.REFUSED)
    assert "was away" in remedy(run_of([_failed("UNAVAILABLE: no engine"), refused, refused]), 0)


def test_timeouts_want_time_or_less_load() -> None:
    found = remedy(run_of([_failed("no end within 5 s", status=Status.TIMEOUT)]), 0)
    assert "lower the rate" in found
    assert "--timeout" in found


def test_answers_still_under_way_want_a_longer_drain() -> None:
    run = run_of([_failed("INTERNAL: oops"), *[Answered(0.0, status=Status.IN_FLIGHT)] * 2])
    assert "--drain-timeout" in remedy(run, 2)
    assert "--drain-timeout" not in remedy(run, 1)


def test_requests_over_the_known_context_are_counted() -> None:
    texts = [f"INVALID_ARGUMENT: the prompt has {length} tokens" for length in (90, 95, 96, 200)]
    played = [
        _failed(text, input_tokens=length, output_tokens=5)
        for text, length in zip(texts, (90, 95, 96, 200), strict=True)
    ]
    run = run_of(played, settings={"max_model_len": 100})
    assert remedy(run, 0).startswith("2 are longer than the server's context of 100 tokens: --max-model-len 100")
    assert "--max-model-len" not in remedy(run_of(played), 0)
