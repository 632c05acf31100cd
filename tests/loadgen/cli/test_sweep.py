"""`sweep` runs the workload at each load with prompts of its own. Running itself is faked."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.checks.selfcheck import Verdict
from loadgen.cli.main import main
from loadgen.cli.run_options import Outcome, measure_options
from loadgen.errors import TargetError
from loadgen.measure.metrics import measure
from loadgen.trace.schema import Trace
from tests.support.loadgen.runs import synthetic_run

RANDOM = ("--dataset", "random", "--num-prompts", "40")


class Fake:
    """Runs at once; TTFT doubles with every rate above 8. Remembers what it was asked."""

    def __init__(self) -> None:
        self.played: list[tuple[str, Trace, int | None, str | None]] = []
        self.level: Any = lambda name: "VALID"
        self.fails_at = ""
        self.failure: BaseException = TargetError("the server is gone")
        self.stopped_at = ""

    def __call__(self, workload: Trace, options: argparse.Namespace, folder: Path, *, salt: str | None) -> Outcome:
        assert list(folder.iterdir()) == []
        self.played.append((folder.name, workload, options.concurrency, salt))
        if folder.name == self.fails_at:
            raise self.failure
        load = float(folder.name.split("-")[1])
        run = synthetic_run(len(workload), rate=load, ttft_ms=50 * max(1.0, load / 8), jitter=0.1)
        run = replace(run, workload=workload, interrupted=folder.name == self.stopped_at)
        (folder / "run.json").write_text("{}")
        metrics = measure(run, measure_options(options))
        return Outcome(run, metrics, Verdict(self.level(folder.name), ()), folder)

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.played]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    found = Fake()
    monkeypatch.setattr("loadgen.cli.sweep.run_and_report", found)
    monkeypatch.chdir(tmp_path)
    return found


def sweep(*arguments: str) -> int:
    return main(["sweep", "--result-dir", "out", *arguments])


def document() -> Any:
    return json.loads(Path("out/sweep.json").read_text())


def rate(trace: Trace) -> float:
    return len(trace) / trace.span_s


def test_every_rate_is_run_and_kept(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(*RANDOM, "--rates", "2:8:x2", "--slo", "ttft:100") == 0
    assert fake.names == ["rate-2", "rate-4", "rate-8"]
    assert [rate(trace) for _, trace, *_ in fake.played] == pytest.approx([2, 4, 8])
    assert all(Path("out", name).is_dir() for name in fake.names)
    assert [load_level["folder"] for load_level in document()["rungs"]] == fake.names
    assert {path.name for path in Path("out").glob("*.png")} == {
        f"sweep-{name}.png" for name in ("latency", "normalized", "goodput", "pareto")
    }
    said = capsys.readouterr().out
    assert "90 % of requests keep TTFT 100 ms up to 8 requests/s" in said


def test_prompts_are_never_the_same_at_two_load_levels(fake: Fake) -> None:
    assert sweep(*RANDOM, "--rates", "2,4") == 0
    assert [salt for *_, salt in fake.played] == [None, None]  # each run draws its own
    fake.played.clear()
    assert main(["sweep", "--result-dir", "again", *RANDOM, "--rates", "2,4", "--prompt-salt", "mine"]) == 0
    assert [salt for *_, salt in fake.played] == ["mine-rate-2", "mine-rate-4"]


def test_concurrency_is_a_closed_loop_of_the_same_requests(fake: Fake) -> None:
    assert sweep(*RANDOM, "--concurrencies", "1,4,16") == 0
    assert [concurrency for _, _, concurrency, _ in fake.played] == [1, 4, 16]
    assert len({id(trace) for _, trace, *_ in fake.played}) == 1
    assert document()["axis"] == "concurrency"


def test_a_load_level_lasts_as_long_as_asked(fake: Fake) -> None:
    assert sweep("--dataset", "random", "--rates", "2,8", "--level-duration", "10s") == 0
    assert [len(trace) for _, trace, *_ in fake.played] == [20, 80]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """100 requests in 50 s, in pairs."""
    path = tmp_path / "trace.jsonl"
    arrivals = np.repeat(np.arange(50) * 1.0, 2) + np.tile([0.0, 0.13], 50)
    path.write_text(
        "".join(
            json.dumps({"arrival_s": at, "input_tokens": 20, "output_tokens": 5}) + "\n" for at in arrivals.tolist()
        )
    )
    return path


def test_a_trace_is_run_faster_and_keeps_its_shape(fake: Fake, trace: Path) -> None:
    assert sweep("--trace", str(trace), "--dequantize", "off", "--rates", "1,4") == 0
    slow, fast = (one for _, one, *_ in fake.played)
    assert len(slow) == len(fast) == 100
    np.testing.assert_allclose(slow.arrival_s, 4 * fast.arrival_s)
    assert rate(slow) == pytest.approx(1)


def test_a_trace_is_cut_to_the_duration(fake: Fake, trace: Path) -> None:
    assert sweep("--trace", str(trace), "--dequantize", "off", "--rates", "1,4", "--level-duration", "20s") == 0
    assert [len(one) for _, one, *_ in fake.played] == [20, 80]
    assert [one.span_s for _, one, *_ in fake.played] == pytest.approx([20, 20])


def test_a_part_of_a_trace_has_the_rate_of_its_load_level(fake: Fake, tmp_path: Path) -> None:
    """A trace that is quiet at first and busy later: 100 requests a second apart, then 100 in ten seconds."""
    arrivals = [*range(100), *(100 + number / 10 for number in range(100))]
    path = tmp_path / "quiet-then-busy.jsonl"
    path.write_text("".join(f'{{"arrival_s": {at}, "input_tokens": 20, "output_tokens": 5}}\n' for at in arrivals))
    assert sweep("--trace", str(path), "--dequantize", "off", "--rates", "2,4,8", "--level-duration", "20s") == 0
    assert [rate(one) for _, one, *_ in fake.played] == pytest.approx([2, 4, 8])


def test_a_trace_that_is_too_short_is_refused_before_anything_is_run(
    fake: Fake, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--trace", str(trace), "--dequantize", "off", "--rates", "1,8", "--level-duration", "20s") == 2
    assert "8 requests/s need 160 requests, the trace has 100" in capsys.readouterr().err
    assert fake.played == []


def test_more_requests_than_fit_into_memory_are_refused_before_anything_is_run(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--dataset", "random", "--rates", "1,1e12", "--level-duration", "1h") == 2
    assert "1e+12 requests/s need 3600000000000000 requests, 5000000 at most" in capsys.readouterr().err
    assert fake.played == []


def test_bisection_looks_for_the_highest_rate(fake: Fake) -> None:
    """TTFT p90 is near 100 ms at a rate of 13 or so."""
    arguments = ("--dataset", "random", "--num-prompts", "300", "--bisect", "--slo", "ttft:100")
    assert sweep(*arguments, "--rates", "4,32", "--precision", "0.1") == 0
    answer = document()["answers"][0]
    assert 4 < answer["load"] < answer["limit"] <= 1.1 * answer["load"] < 32
    assert answer["proven"]


def test_an_invalid_load_level_is_run_again_into_a_folder_of_its_own(fake: Fake) -> None:
    fake.level = lambda name: "INVALID" if name == "rate-4" else "VALID"
    assert sweep(*RANDOM, "--rates", "2,4,8", "--strict") == 0
    assert fake.names == ["rate-2", "rate-4", "rate-4-take-2", "rate-8"]
    assert [load_level["used"] for load_level in document()["rungs"]] == [True, False, True, True]


def test_strict_says_when_a_load_level_stays_invalid(fake: Fake) -> None:
    fake.level = lambda name: "INVALID" if name.startswith("rate-4") else "VALID"
    assert sweep(*RANDOM, "--rates", "2,4", "--retries", "0", "--strict") == 3
    assert fake.names == ["rate-2", "rate-4"]


def test_a_server_that_goes_away_leaves_a_report(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fails_at = "rate-4"
    assert sweep(*RANDOM, "--rates", "2,4,8") == 2
    assert "error: at 4 requests/s: the server is gone" in capsys.readouterr().err
    assert [load_level["load"] for load_level in document()["rungs"]] == [2]


def test_ctrl_c_between_two_load_levels_leaves_a_report(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fails_at, fake.failure = "rate-4", KeyboardInterrupt()
    assert sweep(*RANDOM, "--rates", "2,4,8") == 130
    assert "error: stopped before 4 requests/s" in capsys.readouterr().err
    assert [load_level["load"] for load_level in document()["rungs"]] == [2]
    assert document()["interrupted"]


def test_a_dry_run_runs_nothing(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(*RANDOM, "--rates", "1:64:x1.5", "--dry-run") == 0
    assert fake.played == []
    assert not Path("out").exists()
    assert "11 load levels: 1, 1.5, 2.25" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--rates", "4:1:x2"), "--rates 4:1:x2: 4 is above 1"),
        (("--concurrencies", "1.5"), "is not a whole number"),
        (("--rates", "1,2", "--bisect"), "--bisect needs limits"),
        (("--rates", "1,2", "--request-rate", "5"), "leave --request-rate out"),
        (("--rates", "1,2", "--rate-steps", "1:5s,2:5s"), "leave --rate-steps out"),
        (("--rates", "1,2", "--speed", "2"), "leave --speed out"),
        (("--concurrencies", "1,2", "--max-concurrency", "5"), "leave --max-concurrency out"),
        (("--rates", "1,2", "--target", "ftp://h:1"), "--target ftp://h:1: must begin with"),
        (("--concurrencies", "1,2", "--level-duration", "5s"), "--level-duration is for --rates"),
        (("--rates", "1,2", "--level-duration", "5s"), "--level-duration and --num-prompts"),
        (
            ("--rates", "1,2", "--goodput", "ttft:1", "ttft:2"),
            "--goodput gives ttft both 1.0 and 2.0; give one of them",
        ),
    ],
)
def test_bad_arguments_are_named(
    arguments: tuple[str, ...], why: str, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*RANDOM, *arguments) == 2
    assert why in capsys.readouterr().err
    assert fake.played == []


@pytest.mark.parametrize("arguments", [(), ("--rates", "1", "--concurrencies", "1")])
def test_rates_or_concurrencies_and_not_both(arguments: tuple[str, ...], fake: Fake) -> None:
    with pytest.raises(SystemExit) as caught:
        sweep(*RANDOM, *arguments)
    assert caught.value.code == 2


def test_the_page_shows_a_command_that_can_be_run_again(fake: Fake) -> None:
    assert sweep("--rates", "2", *RANDOM, "--tag", "host=two words") == 0
    assert "--tag &#39;host=two words&#39;" in Path("out/sweep.html").read_text()
