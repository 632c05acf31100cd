"""Files as records: lines of CSV or JSON, plain or gzip, each with its line number. Knows no format."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TextIO

from loadgen.errors import TraceError
from loadgen.trace.formats import MalformedRowError, Record

_GZIP_MAGIC = b"\x1f\x8b"


class Records:
    """The records of one file, read lazily and once.

    Attributes:
        kind: "jsonl" if the first line with anything on it begins with a brace, else "csv".
        names: the CSV header, or the names in the first JSON object; empty if that cannot be read.
    """

    kind: Literal["csv", "jsonl"]
    names: tuple[str, ...]

    def __init__(self, text: TextIO) -> None:
        """Reads the first line. Raises: TraceError: there is none."""
        self._text = text
        self._first_line, self._first = next(
            ((number, line) for number, line in enumerate(text, 1) if line.strip()), (0, "")
        )
        if not self._first:
            raise TraceError("the file is empty")
        self.kind = "jsonl" if self._first.lstrip().startswith("{") else "csv"
        if self.kind == "jsonl":
            try:
                self.names = tuple(_json_object(self._first))
            except MalformedRowError:
                self.names = ()
        else:
            self.names = tuple(name.strip() for name in next(csv.reader([self._first])))

    def __iter__(self) -> Iterator[tuple[int, Record | MalformedRowError]]:
        """Line numbers, from 1, and what is on those lines. Blank lines are no records."""
        return self._json_rows() if self.kind == "jsonl" else self._csv_rows()

    def _json_rows(self) -> Iterator[tuple[int, Record | MalformedRowError]]:
        for number, line in enumerate(chain([self._first], self._text), self._first_line):
            if line.strip():
                try:
                    yield number, _json_object(line)
                except MalformedRowError as error:
                    yield number, error

    def _csv_rows(self) -> Iterator[tuple[int, Record | MalformedRowError]]:
        for number, line in enumerate(self._text, self._first_line + 1):
            if not line.strip():
                continue
            row = next(csv.reader([line]))  # a line at a time: a quote that is never closed takes no other rows with it
            if len(row) == len(self.names):
                yield number, {name: value.strip() for name, value in zip(self.names, row, strict=True)}
            else:
                yield number, MalformedRowError("columns", f"{len(row)} columns, the header has {len(self.names)}")


@contextmanager
def open_records(path: Path) -> Iterator[Records]:
    """Opens a file, compressed or not, independent of its name.

    Raises: TraceError: it cannot be opened or read to its end, holds no text, or is empty (names the file).
    """
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == _GZIP_MAGIC
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if compressed
            else path.open(encoding="utf-8-sig", newline="")
        ) as text:
            yield Records(text)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: the gzip file is damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text in UTF-8: {error}") from error
    except csv.Error as error:
        raise TraceError(f"{path}: not CSV: {error}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _json_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedRowError("json", f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MalformedRowError("json", "not a JSON object")
    return value
