"""Showing people how far a start-up is that takes seconds or minutes: whoever starts it says how."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Shows progress while something is iterated over; `tqdm.tqdm` is one."""

    def __call__(self, iterable: Iterable[T], /, *, desc: str, total: int) -> Iterable[T]:
        """Yields what the iterable does.

        Args:
            iterable: pieces of work, or what each has yielded.
            desc: what is being done.
            total: how many there are.
        """
        ...


def no_progress(iterable: Iterable[T], /, *, desc: str, total: int) -> Iterable[T]:  # noqa: ARG001 - shows nothing
    """Shows nothing."""
    return iterable
