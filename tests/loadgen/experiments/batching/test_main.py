"""The whole experiment: small, on real processes, and command lines it refuses."""

import json
import re
from pathlib import Path

import pytest

from loadgen.experiments.batching.__main__ import main


def trace_file(folder: Path) -> Path:
    """Twelve requests, one a second."""
    rows = [
        f"2023-11-16 18:00:{second:02}.0000000,{200 + 40 * second},{24 + 16 * (second % 4)}" for second in range(12)
    ]
    path = folder / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


@pytest.mark.slow
def test_the_experiment_runs_small_on_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_file(tmp_path)
    small = ["--quick", "--rounds", "1", "--sweep-slots", "4", "--out", str(tmp_path / "out")]
    status = main([*small, "--trace", str(trace), "--window", ":"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    (folder,) = (tmp_path / "out").iterdir()
    cases = {case["key"]: case for case in json.loads((folder / "samples.json").read_text())["cases"]}
    assert list(cases) == ["uniform", "mixture", "skewed", "trace", "paced"]

    steps = {
        key: {name: len(rounds[0]["rows_of_steps"]) for name, rounds in case["rounds"].items()}
        for key, case in cases.items()
    }
    assert steps["uniform"] == dict.fromkeys(steps["uniform"], 24)
    assert (steps["mixture"]["static"], steps["mixture"]["continuous"]) == (128, 80)
    assert steps["skewed"]["static"] == 4 * 64
    assert steps["skewed"]["continuous"] < 100
    for case in cases.values():
        for rounds in case["rounds"].values():
            assert min(rounds[0]["ttft_ms"]) > 0
            assert sum(rounds[0]["rows_of_steps"]) >= sum(case["output_tokens"])
        assert case["rounds"]["continuous"][0]["cached_share"] == 0
    assert 0.1 < cases["uniform"]["rounds"]["continuous + prefix cache"][0]["cached_share"] <= 0.5
    assert cases["trace"]["rounds"]["continuous + prefix cache"][0]["cached_share"] == 0

    assert captured.err.count("are the same from every system") == 4 + 1
    for line in captured.out.splitlines():  # ids before speed
        if match := re.match(r"== (uniform|mixture|skewed|trace): ", line):
            assert f"{match[1]}: the ids of all" in captured.err
    assert (folder / "report.html").stat().st_size > 100_000
    assert str(folder / "report.html") in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-folder"], "--model no-such-folder: no folder with a config.json"),
        (["--out", "/proc/nowhere"], "--out /proc/nowhere: "),
    ],
)
def test_what_cannot_work_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"loadgen.experiments.batching: error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--load", "0"], ["--window", "a:b"], ["--length-scale", "-1"], ["--speed", "2"]]
)
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
