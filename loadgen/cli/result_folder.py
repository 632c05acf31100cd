"""Where the results of a command go: there before anything is run, gone again if nothing was written."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from loadgen.atomic_file import writing_to
from loadgen.errors import ResultError


@contextmanager
def result_folder(named: Path | None, verb: str) -> Iterator[Path]:
    """Makes an empty folder that can be written to.

    Args:
        named: by `--result-dir`; None makes one of the verb and the time.
        verb: of the command.

    Raises: ResultError: it cannot be made or written to, or holds another run.
    """
    folder = named or Path("loadgen-results") / f"{verb}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_kept_if_filled(folder))
            if any(folder.iterdir()):
                raise ResultError(f"--result-dir {folder}: is not empty; name another one")
            probe = folder / ".probe"
            probe.write_bytes(bytes(1 << 16))
            probe.unlink()
        except OSError as error:
            raise ResultError(f"--result-dir {folder}: {error.strerror or error}") from error
        yield folder


@contextmanager
def part_of_results(folder: Path) -> Iterator[Path]:
    """Makes the folder of one run of several.

    Raises: ResultError: it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        with writing_to(folder.parent):
            stack.enter_context(_kept_if_filled(folder))
        yield folder


@contextmanager
def _kept_if_filled(folder: Path) -> Iterator[None]:
    """Makes a folder and those above it; what was made here and is empty in the end goes again."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the first that holds something
            for each in made:
                each.rmdir()
