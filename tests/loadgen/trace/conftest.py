"""Small files of every format, and the stored traces where they are."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[[str, str], Path]
WriteRows = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a text under a name, compressed if the name ends in .gz; line ends as they are."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


@pytest.fixture
def write_rows(write: Write) -> WriteRows:
    """Writes JSON objects, one per line."""

    def write_rows(*rows: dict[str, Any], name: str = "trace.jsonl") -> Path:
        return write(name, "".join(json.dumps(row) + "\n" for row in rows))

    return write_rows


@pytest.fixture(scope="session")
def stored_traces() -> Path:
    """The folder of real traces with their stats.json."""
    folder = os.environ.get("CHAIRLIFT_TRACES")
    if not folder:
        pytest.skip("CHAIRLIFT_TRACES does not say where the stored traces are")
    return Path(folder)
