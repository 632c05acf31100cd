"""`simulate`: its tables, its files and pictures, the size of a fleet, and one line for each error."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
CLASSES = """
[classes.interactive]
ttft_ms = 500
inter_token_ms = 30
pacing = "paced"
when_infeasible = "refuse"
[classes.batch]
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"arrival_s": 0.05 * i, "input_tokens": 100 + 37 * i % 900, "output_tokens": 5 + i % 40} for i in range(200)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def classes(tmp_path):
    path = tmp_path / "classes.toml"
    path.write_text(CLASSES)
    return path


def simulate(*flags):
    return main(["simulate", *map(str, flags)])


def test_policies_are_compared_at_several_loads(trace, classes, tmp_path, capsys):
    flags = [
        "--service-classes",
        classes,
        "--mix",
        "interactive=3,batch=1",
        "--policy",
        "slo",
        "fcfs",
        "shortest-timeout@256",
    ]
    status = simulate(
        "--trace", trace, *flags, "--loads", "1,20", "--json", tmp_path / "out.json", "--draw", tmp_path / "pictures"
    )  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0
    assert re.search(r"^load 20: .*no policy can exceed", out, re.MULTILINE)
    assert len(re.findall(r"^shortest-timeout@256 ", out, re.MULTILINE)) == 4  # two tables for each load
    written = json.loads((tmp_path / "out.json").read_text())
    first = written["loads"][0]
    assert first["load"] == 1
    assert [result["policy"] for result in first["results"]] == ["slo", "fcfs", "shortest-timeout@256"]
    for one in written["loads"]:
        for result in one["results"]:
            assert sum(part["num_requests"] for part in result["classes"]) == 200
            assert result["total"]["num_good"] / 200 <= one["bound"]
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {
        f"simulation-{name}.{kind}" for name in ("goodput", "classes-1x", "classes-20x") for kind in ("png", "svg")
    }


def test_baselines_are_printed_beside(trace, capsys):
    assert simulate("--trace", trace, "--baselines", "--limit", 20) == 0
    lines = capsys.readouterr().out.splitlines()
    policies = [line.split()[0] for line in lines[lines.index("") + 3 :]]
    assert policies[:3] == ["fcfs", "fcfs@2048", "fcfs-bounded"]
    assert "shortest-timeout" in policies


def test_the_number_of_engines_is_searched(trace, classes, capsys):
    flags = ("--trace", trace, "--service-classes", classes, "--loads", 40, "--engines-for", 0.99)
    assert simulate(*flags) == 0
    answer = re.search(r"^(\d+) engines for 99 % good$", capsys.readouterr().out, re.MULTILINE)
    assert answer is not None
    needed = int(answer[1])
    assert simulate(*flags, "--max-engines", needed - 1) == 1
    assert f"not enough: {needed - 1} engine" in capsys.readouterr().out


def test_repeats_are_later_parts_of_the_trace(trace, tmp_path):
    out = tmp_path / "out.json"
    assert simulate("--trace", trace, "--duration", 3, "--repeats", 3, "--shift", 50, "--json", out) == 0
    assert json.loads(out.read_text())["loads"][0]["results"][0]["total"]["num_requests"] == 3 * 60


def test_requests_that_arrive_at_once_have_no_rates(tmp_path, capsys):
    path = tmp_path / "once.jsonl"
    path.write_text(8 * '{"arrival_s": 3, "input_tokens": 9, "output_tokens": 2}\n')
    assert simulate("--trace", path) == 0
    out = capsys.readouterr().out
    assert "load 1: all requests at once; no policy can exceed 100.0 % good\n" in out
    assert re.search(r"^fcfs +- +100.0 % +- +100.0 % .* - s$", out, re.MULTILINE)
    assert "nan" not in out


def test_a_step_log_alone_is_fitted(tmp_path, capsys):
    path = tmp_path / "steps.jsonl"
    lines = []
    for step in range(1, 121):
        num_tokens = 10 + 7 * step % 90
        fields = {
            "step": step, "t_ms": 0.0, "running": 0, "waiting": 0,
            "schedule_ms": 1.0, "execute_ms": 3.0 + 0.5 * num_tokens, "update_ms": 1.0,
            "scheduled": {str(step): num_tokens}, "preempted": [],
            "finished": {str(step): "MAX_TOKENS"}, "usage": {str(step): [num_tokens, 0, 1]},
        }  # fmt: skip
        lines.append(json.dumps(fields) + "\n")
    path.write_text("".join(lines))
    assert simulate("--step-log", path) == 0
    out = capsys.readouterr().out
    assert out.startswith("fitted to 72 steps, 0 of unknown shape left out: step = ")
    assert "error on 48 steps not seen: p50 0 %" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--trace FILE is missing"),
        (
            ["--trace", "TRACE", "--policy", "best"],
            "--policy best: is unknown; there are fcfs, priority, static, slo, shortest",
        ),
        (["--trace", "TRACE", "--policy", "fcfs@0"], "--policy fcfs@0: has a budget of '0' tokens"),
        (["--trace", "TRACE", "--mix", "a=1"], "--mix needs --service-classes"),
        (["--trace", "TRACE", "--service-classes", "CLASSES", "--mix", "gold=1"], "--mix names class 'gold'"),
        (["--trace", "TRACE", "--service-classes", "CLASSES", "--mix", "batch=0"], "gives no class a share"),
        (["--trace", "TRACE", "--service-classes", "TRACE"], "--service-classes"),
        (["--trace", "TRACE", "--step-log", "TRACE"], "is no line of --step-log"),
        (["--trace", "TRACE", "--step-log", "TRACE", "--device", "h200-8b"], "--device h200-8b and --step-log both"),
        (["--trace", "TRACE", "--kv-cache-tokens", "512"], "a request has "),
        (["--trace", "TRACE", "--duration", "60"], "needs 1206 requests after the first 0, the trace has 200"),
        (["--trace", "TRACE", "--warmup", "9", "--loads", "1,2"], "--warmup 9: at load 2 the last request arrives"),
        (["--trace", "TRACE", "--limit", "1", "--duration", "5"], "--duration 5: all requests arrive at once"),
        (["--trace", "TRACE", "--limit", "1", "--draw", "pictures"], "--draw pictures: pictures show rates"),
        (["--trace", "TRACE", "--engines-for", "0.9", "--baselines"], "--engines-for takes one policy and one load"),
        (["--trace", "TRACE", "--engines-for", "0"], "--engines-for is 0"),
        (["--trace", "TRACE", "--engines-for", "0.9", "--engines", "7"], "leave --engines 7 out"),
        (["--trace", "TRACE", "--engines-for", "0.9", "--draw", "pictures"], "leave --draw pictures out"),
        (["--trace", "TRACE", "--max-engines", "7"], "--max-engines 7 needs --engines-for"),
        (["--trace", "TRACE", "--kv-cache-tokens", "9"], "--block-size 16: the KV cache of an engine holds 9 tokens"),
    ],
)
def test_an_error_is_one_line(flags, message, trace, classes, capsys):
    paths = {"TRACE": trace, "CLASSES": classes}
    assert simulate(*(paths.get(flag, flag) for flag in flags)) == 2
    err = capsys.readouterr().err
    assert err.startswith("chairlift-loadgen simulate: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--mix", "a"],
        ["--mix", "a=1,a=2"],
        ["--loads", "1,0"],
        ["--device", "abacus"],
        ["--noise", "1000"],
        ["--engines", "1g"],
    ],
)
def test_a_malformed_flag_is_refused(flags, trace, capsys):
    with pytest.raises(SystemExit) as end:
        simulate("--trace", trace, *flags)
    assert end.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_simulate_imports_neither_torch_nor_the_wire(trace):
    heavy = ("torch", "triton", "numba", "grpc", "google.protobuf", "pydantic", "matplotlib")
    code = (
        "import sys; from frontend.cli.main import main; status = main(sys.argv[1:]); "
        f"print([name for name in {heavy} if name in sys.modules], status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", "--trace", str(trace), "--limit", "5"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("[] 0\n"), done.stdout + done.stderr
