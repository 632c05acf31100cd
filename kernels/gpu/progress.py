"""Progress of a start-up that takes seconds or minutes; the caller chooses how it is shown."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Shows progress while something is iterated over; `tqdm.tqdm` is one."""

    def __call__(self, iterable: Iterable[T], /, *, desc: str, total: int) -> Iterable[T]:
        """Yields the items of the iterable.

        Args:
            iterable: pieces of work, or their results.
            desc: what is being done.
            total: number of items.
        """
        ...


def no_progress(iterable: Iterable[T], /, *, desc: str, total: int) -> Iterable[T]:  # noqa: ARG001 - shows nothing
    """Shows nothing."""
    return iterable
