"""Checks of request fields. Each raises an InvalidRequest with the field, its value and the allowed range."""

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from frontend.errors import InvalidRequest
from frontend.text.served_model import ServedModel


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Checks low <= value <= high."""
    if not low <= value <= high:
        raise InvalidRequest(
            f"{_last(field)} is {value:g}, it must be at least {low:g} and at most {high:g}", field=field
        )


def check_at_most(field: str, number: int, most: int, unit: str) -> None:
    """Checks a count."""
    if number > most:
        raise InvalidRequest(f"{_last(field)} has {number} {unit}, at most {most} are allowed", field=field)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Checks that all ids are in the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"{_last(field)} contains token id {largest}, the vocabulary has {vocab_size} tokens", field=field
        )


def check_has_tokens(field: str, model: ServedModel) -> None:
    """Checks that the model has a tokenizer, which texts need."""
    if not model.tokenizer.has_tokens:
        raise InvalidRequest("the model has no tokenizer: send token_ids, and take token_ids", field=field)


def duration_s(duration: Duration, name: str, field: str) -> float:
    """Returns the seconds of a Duration, whose two fields must agree."""
    seconds, nanos = duration.seconds, duration.nanos
    if not -(10**9) < nanos < 10**9 or seconds * nanos < 0:
        raise InvalidRequest(
            f"{name} has {seconds} seconds and {nanos} nanos: the nanos of a Duration are less than a second, and "
            "of the same sign",
            field=field,
        )
    return seconds + nanos / 1e9


def _last(field: str) -> str:
    return field.rpartition(".")[2]
