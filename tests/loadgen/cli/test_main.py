"""What every verb has in common: wrong flags, Ctrl-C at any time, readers that go away."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli.main import main
from loadgen.store import load
from tests.hang import HANG_S

_RUN = ["run", "--target", "null:", "--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "4"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--num-promts", "4"], "run: error: unknown: --num-promts 4; did you mean --num-prompts?"),
        (["run", "--tracee=x"], "run: error: unknown: --tracee=x"),
        (["run", "--request-rat=4"], "run: error: unknown: --request-rat=4; did you mean --request-rate?"),
        (["replay", "--zzz"], "replay: error: unknown: --zzz"),
        (["replay", "a.csv"], "replay: error: unknown: a.csv; did you mean --trace a.csv?"),
        (["replay", "--trac", "a.csv"], "replay: error: unknown: --trac a.csv; did you mean --trace?"),
        (
            ["run", "--num-prompts", "none"],
            "run: error: --num-prompts is none, it must be a whole number between 1 and 5000000",
        ),
        (
            ["trace", "inspect", "a.csv", "--sort-rows"],
            "trace inspect: error: unknown: --sort-rows; did you mean --sort?",
        ),
    ],
)
def test_a_wrong_flag_is_one_line_with_its_verb(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    (said,) = capsys.readouterr().err.splitlines()
    verb = complaint.partition(":")[0]
    assert said.startswith(f"chairlift-loadgen {complaint}")
    assert said.endswith(f" (see chairlift-loadgen {verb} --help)")
    assert ("did you mean" in said) == ("did you mean" in complaint)


def test_ctrl_c_while_the_verb_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["run"]) == 130
    assert capsys.readouterr().err == "chairlift-loadgen run: stopped\n"


def test_saying_what_would_be_run_draws_nothing(tmp_path: Path) -> None:
    code = "import sys; from loadgen.cli.main import main; main(sys.argv[1:]); print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *_RUN, "--dry-run"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert list(tmp_path.iterdir()) == []


def _pipe_without_a_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def _terminal_that_was_closed() -> int:
    ours, theirs = os.openpty()
    os.close(ours)
    return theirs


@pytest.mark.parametrize("output", [_pipe_without_a_reader, _terminal_that_was_closed])
def test_results_are_written_though_the_output_is_closed(output: Callable[[], int], tmp_path: Path) -> None:
    with os.fdopen(output(), "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "loadgen", *_RUN, "--result-dir", str(tmp_path / "out")],
            stdout=closed,
            stderr=closed,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"run.json", "result.json", "report.html"}


def test_results_are_written_though_there_is_no_room_for_progress(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "loadgen", *_RUN, "--result-dir", str(tmp_path / "out")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=HANG_S, check=False)
    assert done.returncode == 0
    assert done.stdout.decode().splitlines()[-1] == f"Results: {tmp_path / 'out'}"
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"run.json", "result.json", "report.html"}


def test_results_are_written_though_there_is_no_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadgen", *_RUN, "--result-dir", str(tmp_path / "out")]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], timeout=HANG_S, check=False)
    assert done.returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"run.json", "result.json", "report.html"}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_results_are_written_whatever_characters_are_in_names(encoding: str, tmp_path: Path) -> None:
    folder = tmp_path / "ü"
    command = [sys.executable, "-m", "loadgen", *_RUN, "--tag", b"k=\xff", "--result-dir", folder]
    environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.splitlines()[-1].endswith("ü".encode() if encoding == "utf-8" else b"\\xfc")
    assert {path.name for path in folder.iterdir()} >= {"run.json", "result.json", "report.html"}
    assert load(folder).settings["tags"] == {"k": "\udcff"}
    assert b"\\udcff" in (folder / "report.html").read_bytes()


def test_sigterm_to_all_processes_leaves_a_report(tmp_path: Path) -> None:
    """As `timeout` sends it: to the command, then once more to its whole group."""
    command = [sys.executable, "-m", "loadgen", "run", "--target", "null:?ttft_ms=1e7", *_RUN[3:]]
    with subprocess.Popen(
        [*command, "--result-dir", str(tmp_path / "out")], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("starts in")
        running.terminate()
        os.killpg(running.pid, signal.SIGTERM)
        said = running.communicate(timeout=HANG_S)[1]
    assert running.returncode == 130, said
    assert "in flight aborted; writing the report of this run" in said
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["run"]["interrupted"]
    assert result["verdict"]["partial"]
    assert "died" not in str(result["verdict"]["reasons"])
