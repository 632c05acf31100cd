"""What was saved comes back as it was, or not at all."""

import errno
import gzip
import json
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen import atomic_file
from loadgen.errors import ResultError
from loadgen.measure.metrics import measure
from loadgen.record import RunData, Status
from loadgen.store import RECORDS, RUN, WORKERS, load, save
from loadgen.trace.schema import Accounting, Blocks, workload_digest
from tests.support.loadgen.runs import Answered, run_of, synthetic_run

_EVERY_FATE = {status: 3 for status in Status if status != Status.OK}


def _assert_equal(one: Any, other: Any, where: str = "run") -> None:
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        assert np.array_equal(one, other), where
    elif hasattr(one, "__dataclass_fields__"):
        assert type(one) is type(other), where
        for field in fields(one):
            _assert_equal(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}")
    elif isinstance(one, tuple):
        assert len(one) == len(other), where
        for index, (mine, its) in enumerate(zip(one, other, strict=True)):
            _assert_equal(mine, its, f"{where}[{index}]")
    else:
        assert one == other, where


def _with_sessions(run: RunData) -> RunData:
    """And everything else a trace can be."""
    return replace(
        run,
        workload=replace(
            run.workload,
            sessions=np.arange(len(run.requests), dtype=np.int64) - 1,
            accounting=Accounting(90, {"too long": 70}, {"clipped": 3}),
            speed=2.5,
        ),
    )


@pytest.mark.parametrize(
    "run",
    [
        run_of([]),
        run_of([Answered(0.1, ((0.2, 1), (0.2, 4), (0.3, 1)))], interrupted=True),
        synthetic_run(80, outcomes=_EVERY_FATE),
        synthetic_run(80, shared_block_tokens=64, tokens_per_message=3, num_workers=3),
        _with_sessions(synthetic_run(20)),
        replace(synthetic_run(5), server_metrics=("a 1\n", "a 2\n"), errors=("\N{SNOWMAN} \"quoted\"\n",)),
        replace(synthetic_run(5), errors=('HTTP 500: {"text": "\ud83d', "\udcff\\ud83d")),  # cut in mid-character
    ],
    ids=["empty", "one", "every fate", "blocks", "sessions", "server metrics", "no UTF-8"],
)  # fmt: skip
def test_a_run_comes_back_equal(run: RunData, tmp_path: Path) -> None:
    save(run, tmp_path / "new" / "folder")
    back = load(tmp_path / "new" / "folder")
    _assert_equal(back, run)
    assert workload_digest(back.workload) == workload_digest(run.workload)


def test_blocks_without_an_id_for_some_requests_come_back() -> None:
    run = synthetic_run(3)
    blocks = Blocks(np.array([5, 6]), np.array([0, 0, 2, 2]), 16)
    _assert_equal(replace(run, workload=replace(run.workload, blocks=blocks)).workload.blocks, blocks)


def test_records_can_be_read_by_anyone(tmp_path: Path) -> None:
    save(run_of([Answered(0.25, ((0.5, 1), (0.75, 1)), error=""), Answered(1.0, status=Status.DROPPED)]), tmp_path)
    with gzip.open(tmp_path / RECORDS) as file:
        first, second = map(json.loads, file)
    assert (first["status"], first["scheduled_ns"], first["chunk_ns"]) == (
        "OK",
        250_000_000,
        [500_000_000, 250_000_000],
    )
    assert first["chunk_tokens"] == 1
    assert second["status"] == "DROPPED"
    assert "sent_ns" not in second
    assert json.loads((tmp_path / RUN).read_text())["schema"] == "loadgen.run/v1"


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save(synthetic_run(10, seed=1), tmp_path)
    save(synthetic_run(12, seed=2), tmp_path)
    assert len(load(tmp_path).requests) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([RUN, RECORDS, WORKERS])


def test_whoever_reads_meanwhile_keeps_the_old_file(tmp_path: Path) -> None:
    save(synthetic_run(10, seed=1), tmp_path)
    before = (tmp_path / RUN).read_bytes()
    with (tmp_path / RUN).open("rb") as old:
        save(synthetic_run(12, seed=2), tmp_path)
        assert old.read() == before


def test_messages_come_back_by_worker_and_time(tmp_path: Path) -> None:
    run = synthetic_run(40, num_workers=3)
    save(replace(run, chunks=run.chunks[np.argsort(run.chunks["request"], kind="stable")]), tmp_path)
    chunks = load(tmp_path).chunks
    workers = run.requests["worker"][chunks["request"]]
    assert (np.diff(workers) >= 0).all()
    assert all((np.diff(chunks["arrived_ns"][workers == worker]) >= 0).all() for worker in range(3))


def test_figures_of_a_reloaded_run_are_the_same(tmp_path: Path) -> None:
    run = synthetic_run(100, outcomes={Status.TIMEOUT: 4})
    save(run, tmp_path)
    assert repr(measure(load(tmp_path)).steady) == repr(measure(run).steady)  # some are NaN


def test_settings_without_a_json_form_are_kept_as_text(tmp_path: Path) -> None:
    save(synthetic_run(2, settings={"request_rate": math.inf, "share": math.nan}), tmp_path)
    settings = load(tmp_path).settings
    assert (settings["request_rate"], settings["share"]) == ("inf", None)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def _drop_line(path: Path) -> None:
    with gzip.open(path) as file:
        lines = file.readlines()
    with gzip.open(path, "wb") as file:
        file.writelines(lines[:-1])


@pytest.mark.parametrize("name", [RUN, RECORDS, WORKERS])
@pytest.mark.parametrize("damage", [Path.unlink, _truncate, _flip, lambda path: path.write_bytes(b"")])
def test_a_damaged_run_is_refused_by_name(name: str, damage: Callable[[Path], object], tmp_path: Path) -> None:
    save(synthetic_run(50), tmp_path)
    damage(tmp_path / name)
    with pytest.raises(ResultError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize("name", [RECORDS, WORKERS])
def test_no_single_wrong_byte_goes_unnoticed(name: str, tmp_path: Path) -> None:
    """But in the head of the gzip file, where times and flags stand that mean nothing."""
    save(synthetic_run(50), tmp_path)
    sound = (tmp_path / name).read_bytes()
    for place in np.linspace(10, len(sound) - 1, 60).astype(int).tolist():
        (tmp_path / name).write_bytes(sound[:place] + bytes([sound[place] ^ 0x55]) + sound[place + 1 :])
        with pytest.raises(ResultError, match="damaged"):
            load(tmp_path)


@pytest.mark.parametrize("name", [RECORDS, WORKERS])
def test_a_missing_line_is_noticed_though_the_file_is_sound(name: str, tmp_path: Path) -> None:
    save(synthetic_run(50), tmp_path)
    _drop_line(tmp_path / name)
    with pytest.raises(ResultError, match="damaged"):
        load(tmp_path)


def test_records_of_another_run_are_noticed(tmp_path: Path) -> None:
    save(synthetic_run(50, seed=1), tmp_path / "one")
    save(synthetic_run(50, seed=2), tmp_path / "two")
    (tmp_path / "one" / RECORDS).replace(tmp_path / "two" / RECORDS)
    with pytest.raises(ResultError, match="damaged"):
        load(tmp_path / "two")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"holds no run \(run.json is missing\)"):
        load(tmp_path)
    with pytest.raises(ResultError, match="holds no run"):
        load(tmp_path / "nowhere")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    save(synthetic_run(2), tmp_path)
    head = json.loads((tmp_path / RUN).read_text())
    (tmp_path / RUN).write_text(json.dumps({**head, "schema": "loadgen.run/v2"}))
    with pytest.raises(ResultError, match=r"says 'loadgen.run/v2', this program reads 'loadgen.run/v1'"):
        load(tmp_path)


def test_a_full_disk_names_the_folder_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file.os, "fsync", full)
    with pytest.raises(ResultError, match=rf"{tmp_path}: results cannot be written: No space left on device"):
        save(synthetic_run(5), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(synthetic_run(5), tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file.os, "fsync", full)
    with pytest.raises(ResultError):
        save(synthetic_run(7), tmp_path)
    assert len(load(tmp_path).requests) == 5


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ResultError, match="taken: results cannot be written"):
        save(synthetic_run(2), tmp_path / "taken")
