"""Errors that differ only in numbers are one cause; codes never are."""

import pytest

from loadgen.causes import Cause, causes_of, code_of, without_numbers
from loadgen.record import Status
from tests.support.loadgen.runs import Answered, run_of


def _causes(*texts: str, status: Status = Status.ERROR) -> list[Cause]:
    return causes_of(run_of([Answered(0.0, status=status, ended_s=1.0, error=text) for text in texts]))


def test_numbers_that_differ_become_their_range_and_others_stay() -> None:
    texts = [f"INVALID_ARGUMENT: the limit is 1,024 tokens, the prompt has {length}" for length in (2553, 999, 1500)]
    assert _causes(*texts) == [
        Cause("INVALID_ARGUMENT: the limit is 1,024 tokens, the prompt has 999 to 2553", 3, "INVALID_ARGUMENT")
    ]


def test_numbers_with_thousands_apart_are_in_order() -> None:
    assert _causes("10,500 tokens", "9,800 tokens", "800 tokens")[0].text == "800 to 10,500 tokens"


def test_the_most_frequent_cause_comes_first() -> None:
    causes = _causes("HTTP 500: down", "HTTP 429: full, 3 wait", "HTTP 429: full, 7 wait")
    assert [(cause.text, cause.num_requests) for cause in causes] == [
        ("HTTP 429: full, 3 to 7 wait", 2),
        ("HTTP 500: down", 1),
    ]


def test_codes_are_no_numbers() -> None:
    assert len(_causes("HTTP 500: sorry", "HTTP 503: sorry")) == 2
    assert without_numbers("HTTP 429: 3 of 4 wait") == "HTTP 429: N of N wait"


def test_a_timeout_and_an_error_of_the_same_text_are_two_causes() -> None:
    run = run_of(
        [
            Answered(0.0, status=Status.TIMEOUT, ended_s=5.0, error="no end within 5 s"),
            Answered(0.0, status=Status.ERROR, ended_s=5.0, error="no end within 6 s"),
        ]
    )
    assert sorted(cause.code for cause in causes_of(run)) == ["", "timeout"]


def test_texts_whose_numbers_were_left_out_join_those_that_have_them() -> None:
    with_numbers = [f"the limit is 1024, the prompt has {length} tokens" for length in (2000, 3000)]
    causes = _causes(*with_numbers, without_numbers(with_numbers[0]))
    assert [(cause.text, cause.num_requests) for cause in causes] == [
        ("the limit is 1024, the prompt has N tokens", 3)  # the limit is known, the longest prompt is not
    ]


def test_addresses_and_words_of_other_numbers_of_numbers_do_not_break_it() -> None:
    assert _causes("lost 127.0.0.1:8000", "lost 127.0.0.2:8000")[0].text == "lost 127.0.0.1 to 127.0.0.2:8000"
    assert len(_causes("1 of 2", "1 of 2 of 3")) == 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("RESOURCE_EXHAUSTED: 512 requests wait", "RESOURCE_EXHAUSTED"),
        ("HTTP 404: no such model", "HTTP 404"),
        ("ClientConnectorError: refused", "connection"),
        ("the stream ended without its last message", ""),
        ("worker 1 died with exit code -9", ""),
    ],
)
def test_the_kind_of_an_error_is_read_off_its_text(text: str, code: str) -> None:
    assert code_of(text) == code


def test_a_run_without_errors_has_no_causes() -> None:
    assert causes_of(run_of([Answered(0.0, ((0.1, 1),))])) == []
