"""Result folders of commands: created before the run, and removed again if nothing was written."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from loadgen.atomic_file import writing_to
from loadgen.errors import ResultError


@contextmanager
def result_folder(named: Path | None, verb: str) -> Iterator[Path]:
    """Creates an empty, writable folder.

    Args:
        named: by `--result-dir`; None: a folder named by verb and time.
        verb: of the command.

    Raises: ResultError: it cannot be created or written to, or is not empty.
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
    """Creates the folder of one run of several.

    Raises: ResultError: it cannot be created.
    """
    with contextlib.ExitStack() as stack:
        with writing_to(folder.parent):
            stack.enter_context(_kept_if_filled(folder))
        yield folder


@contextmanager
def _kept_if_filled(folder: Path) -> Iterator[None]:
    """Creates a folder and its parents; removes those that it created and that are empty at the end."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the first one that is not empty
            for each in made:
                each.rmdir()
