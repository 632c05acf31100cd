"""The outcome that each error counts as."""

import asyncio

import pytest

from frontend import errors
from frontend.observability.outcome import failed_outcome, is_refusal


@pytest.mark.parametrize(
    ("error", "word", "word_after_the_deadline"),
    [
        (None, "cancelled", "deadline"),
        (asyncio.CancelledError(), "cancelled", "deadline"),
        (GeneratorExit(), "cancelled", "deadline"),
        (errors.ClientStalled("-"), "cancelled", "cancelled"),
        (errors.DeadlineExceeded("-"), "deadline", "deadline"),
        (errors.QueueFull("-"), "shed", "shed"),
        (errors.EngineUnavailable("-"), "error", "error"),
        (errors.WorkerUnavailable("-"), "error", "error"),
        (errors.ServerDraining("-"), "error", "error"),
        (errors.EngineFault("-"), "error", "error"),
        (ZeroDivisionError(), "error", "error"),
    ],
)
def test_every_error_has_an_outcome(error, word, word_after_the_deadline):
    assert failed_outcome(error, deadline_passed=False).value == word
    assert failed_outcome(error, deadline_passed=True).value == word_after_the_deadline
    assert not is_refusal(error)


@pytest.mark.parametrize("kind", [errors.InvalidRequest, errors.RequestTooLong, errors.ModelNotFound])
def test_invalid_request_counts_as_refused(kind):
    assert is_refusal(kind("-"))


def test_every_request_error_is_in_the_table():
    def below(kind):
        return {kind, *(sub for child in kind.__subclasses__() for sub in below(child))}

    known = {
        *(errors.InvalidRequest, errors.RequestTooLong, errors.ModelNotFound, errors.QueueFull),
        *(errors.TargetsInfeasible, errors.DeadlineExceeded, errors.ClientStalled),
        *(errors.EngineUnavailable, errors.WorkerUnavailable, errors.ServerDraining, errors.EngineFault),
    }
    uncounted = {errors.RequestError, errors.Unauthenticated}  # the latter is raised before a request is counted
    assert {kind for kind in below(errors.RequestError) if kind.__module__ == "frontend.errors"} == known | uncounted
