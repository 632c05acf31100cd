"""Checks of what a frontend sends; errors name the field and the numbers."""

from typing import Any

from chairlift.service.sampling_fields import Parameter
from engine.errors import InvalidRequest


def check_length(field: str, length: int, most: int, unit: str) -> None:
    """Checks a number of things.

    Raises: InvalidRequest: there are more than `most`.
    """
    if length > most:
        raise InvalidRequest(f"{field} has {length} {unit}, at most {most} are allowed")


def check_vocabulary(field: str, largest_id: int, vocab_size: int) -> None:
    """Checks the largest of some token ids.

    Raises: InvalidRequest: it is not in the vocabulary.
    """
    if largest_id >= vocab_size:
        raise InvalidRequest(f"{field} contains token id {largest_id}, the vocabulary has {vocab_size} tokens")


def check_parameter(field: str, parameter: Parameter, value: Any, vocab_size: int) -> None:
    """Checks a value of a sampling or stopping parameter.

    Raises: InvalidRequest: it is out of range.
    """
    problem = parameter.problem(value, vocab_size)
    if problem is not None:
        raise InvalidRequest(f"{field} {problem}")
