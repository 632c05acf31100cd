"""The load generator against the real pair: what it sends is what the trace says, what it says is what happened."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hang import HANG_S
from tests.support.pair import PairAddress

pytestmark = pytest.mark.slow

BLOCK = 16


def write_trace(path: Path, *, num_requests: int, gap_s: float) -> Path:
    """Prompts of 3 blocks: two that all of them share, one of their own."""
    rows = [
        {
            "arrival_s": round(index * gap_s, 6),
            "input_tokens": 3 * BLOCK,
            "output_tokens": 4 + index % 5,
            "blocks": [1, 2, 100 + index],
            "block_tokens": BLOCK,
        }
        for index in range(num_requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loadgen(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadgen", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def read_result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def read_records(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "records.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def test_a_replayed_trace_arrives_whole_and_shares_its_prefixes(pair: PairAddress, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", num_requests=40, gap_s=0.05)
    for name in ("first", "again"):
        out = tmp_path / name
        flags = ("--target", f"grpc://{pair.target}", "--result-dir", str(out), "--prompt-salt", tmp_path.name)
        done = loadgen("replay", "--trace", str(trace), *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        records = read_records(out)
        assert len(records) == 40
        for index, record in enumerate(records):
            assert record["status"] == "OK"
            assert record["input_tokens"] == record["server_input_tokens"] == 3 * BLOCK
            assert record["num_tokens"] == record["server_output_tokens"] == record["output_tokens"] == 4 + index % 5
            # The last token is computed again, so of 48 prompt tokens at most the two shared blocks are found. The
            # first time, requests that arrive together may compute them together.
            assert record["server_cached_tokens"] in ((0, BLOCK, 2 * BLOCK) if name == "first" else (2 * BLOCK,))
        result = read_result(out)
        assert result["completed"] == 40
        assert result["total_output_tokens"] == sum(4 + index % 5 for index in range(40))
        assert {path.name for path in out.iterdir()} >= {"report.html", "result.json", "records.jsonl.gz"}


def test_ctrl_c_leaves_a_report_of_the_part_that_was_played(pair: PairAddress, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", num_requests=2_000, gap_s=0.05)
    out = tmp_path / "out"
    command = ["replay", "--trace", str(trace), "--target", f"grpc://{pair.target}", "--result-dir", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen", *command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:  # plain lines, as this is no terminal; the first with an answer
        if re.search(r"done [1-9]", line):
            break
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, stdout + stderr
    records = read_records(out)
    assert 0 < sum(record["status"] == "OK" for record in records) < 2_000
    assert sum(record["status"] == "UNSENT" for record in records) > 0
    assert re.search(r"^interrupted: \d+ requests? in flight aborted", stderr, re.MULTILINE)
    assert "PARTIAL" in stdout


def test_an_engine_that_dies_in_the_middle_makes_errors_and_no_hang(
    start_pair: Callable[..., PairAddress], tmp_path: Path
) -> None:
    own_pair = start_pair()
    trace = write_trace(tmp_path / "trace.jsonl", num_requests=240, gap_s=0.05)
    out = tmp_path / "out"
    command = ["replay", "--trace", str(trace), "--target", f"grpc://{own_pair.target}", "--result-dir", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen", *command, "--timeout", "5s", "--strict"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(r"done [1-9]", line):
            break
    own_pair.engine.kill()
    stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 3, stdout + stderr
    statuses = [record["status"] for record in read_records(out)]
    assert "OK" in statuses
    assert {"ERROR", "TIMEOUT"} & set(statuses)
    assert "INVALID" in stdout


def test_refused_requests_come_back_and_are_counted_once(
    start_pair: Callable[..., PairAddress], tmp_path: Path
) -> None:
    classes = tmp_path / "classes.toml"
    classes.write_text('[classes.quick]\nttft_ms = 250\nwhen_infeasible = "refuse"\n[classes.batch]\n')
    own_pair = start_pair("--scheduling-policy", "slo", frontend_flags=("--service-classes", str(classes)))
    trace = tmp_path / "burst.jsonl"
    row = json.dumps({"arrival_s": 0.0, "input_tokens": 900, "output_tokens": 4})
    trace.write_text(f"{row}\n" * 40)  # far more prompt tokens than any CPU computes in 0.25 s
    flags = ("--service-classes", str(classes), "--mix", "quick=3,batch=1", "--max-retries", "2")
    for api, target in (("grpc", f"grpc://{own_pair.target}"), ("http", own_pair.http_url)):
        out = tmp_path / api
        done = loadgen(
            "replay", "--trace", str(trace), "--target", target, "--result-dir", str(out), *flags, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Goodput by class" in done.stdout
        quick, batch = read_result(out)["whole_run"]["service_classes"]
        assert (quick["name"], batch["name"]) == ("quick", "batch")
        assert quick["offered"] + batch["offered"] == 40
        assert batch["met"] == batch["offered"]
        assert quick["came_back"] + quick["refused"] > 0
        for one in (quick, batch):
            assert sum(one[name] for name in ("met", "met_at_retry", "late", "refused", "failed")) == one["offered"]
        records = read_records(out)
        came_back = [record for record in records if record["num_retries"]]
        assert len(came_back) == quick["came_back"]
        for record in came_back:
            assert record["sent_ns"] < record["retry_due_ns"] <= record["resent_ns"]
            assert record["service_class"] == 0
        assert {record["status"] for record in records} <= {"OK", "REFUSED"}


def test_unreachable_server_is_one_line(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", num_requests=2, gap_s=0.05)
    done = loadgen("replay", "--trace", str(trace), "--target", "grpc://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 2
    assert "127.0.0.1:9" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
