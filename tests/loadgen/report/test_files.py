"""What is written beside the records."""

import errno
import json
import os
import struct
from pathlib import Path

import pytest

from loadgen import atomic_file
from loadgen.checks.selfcheck import judge
from loadgen.errors import ResultError
from loadgen.measure.metrics import measure
from loadgen.report.files import write_report
from loadgen.report.folder import write_folder
from tests.support.loadgen.runs import synthetic_run


def _write(folder: Path) -> tuple[Path, ...]:
    run = synthetic_run(100)
    metrics = measure(run)
    return write_report(run, metrics, judge(run, metrics), folder)


def test_result_page_and_pictures_are_written_and_always_the_same(tmp_path: Path) -> None:
    paths = _write(tmp_path / "new")
    assert {path.name for path in paths} == {
        "result.json", "report.html", "timeline.png", "latency-cdf.png", "percentiles.png", "ttft-by-prompt.png",
        "requests.png",
    }  # fmt: skip
    assert set((tmp_path / "new").iterdir()) == set(paths)
    assert json.loads((tmp_path / "new" / "result.json").read_text())["schema"] == "loadgen.result/v1"
    for path in paths:
        if path.suffix == ".png":
            head = path.read_bytes()[:24]
            assert head[:8] == b"\x89PNG\r\n\x1a\n"
            assert struct.unpack(">I", head[16:20])[0] == 1440
    for path in _write(tmp_path / "again"):
        assert path.read_bytes() == (tmp_path / "new" / path.name).read_bytes()


def test_a_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file.os, "fsync", full)
    with pytest.raises(ResultError, match=rf"{tmp_path}: results cannot be written: No space left"):
        write_folder(tmp_path, {"result.json": "{}"}, ())
    assert list(tmp_path.iterdir()) == []
