"""Range checks for request fields: each raises an InvalidRequest that names field, value and what is allowed."""

from collections.abc import Sequence

from frontend.errors import InvalidRequest


def check_range(field: str, value: float, low: float, high: float, *, above_low: bool = False, unit: str = "") -> None:
    """Checks low <= value <= high, or low < value <= high. NaN is outside of every range."""
    if not low <= value <= high or (above_low and value == low):
        bounds = f"{'above' if above_low else 'at least'} {low:g} and at most {high:g}"
        raise InvalidRequest(f"{_last(field)} is {value:g}{unit}, it must be {bounds}{unit}", field=field)


def check_at_most(field: str, number: int, most: int, unit: str) -> None:
    """Checks a number of things."""
    if number > most:
        raise InvalidRequest(f"{_last(field)} has {number} {unit}, at most {most} are allowed", field=field)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Checks that all ids are in the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"{_last(field)} contains token id {largest}, the vocabulary has {vocab_size} tokens", field=field
        )


def _last(field: str) -> str:
    return field.rpartition(".")[2]
