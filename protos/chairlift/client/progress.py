"""The progress bar of `generate_many`, drawn by tqdm if that is installed; the client does not depend on it."""

import sys
import time
from types import TracebackType
from typing import Protocol, Self


class _Bar(Protocol):
    """The part of tqdm that is used."""

    def update(self, n: float | None = 1) -> object: ...

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Draws the progress of a batch of prompts; use it in a `with` block.

    Args:
        total: number of prompts.
        show: None: only on a terminal, if tqdm is installed.

    Raises:
        ModuleNotFoundError: `show` is True and tqdm is not installed.
    """

    def __init__(self, total: int, *, show: bool | None) -> None:
        on_terminal = sys.stderr is not None and sys.stderr.isatty()  # None: closed, as in `2>&-`
        self._bar = _bar(total, required=show is True) if show or (show is None and on_terminal) else None
        self._num_shown = 0
        self._started_at_s = time.monotonic()

    def update(self, num_settled: int, num_output_tokens: int) -> None:
        """Draws the state of the batch."""
        if self._bar is not None:
            elapsed_s = max(time.monotonic() - self._started_at_s, 1e-9)
            self._bar.set_postfix_str(f"{num_output_tokens / elapsed_s:.0f} output tokens/s", refresh=False)
            self._bar.update(num_settled - self._num_shown)
            self._num_shown = num_settled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(total: int, *, required: bool) -> _Bar | None:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        if required:
            raise ModuleNotFoundError("the progress bar needs tqdm: pip install tqdm") from None
        return None
    return tqdm(total=total, unit="prompt")
