"""`ab` runs both sides in turn, keeps every run, and compares the pairs that are whole. Running itself is faked."""

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadgen.checks.finding import yes_or_no
from loadgen.checks.selfcheck import Verdict
from loadgen.cli.main import main
from loadgen.cli.run_options import Outcome
from loadgen.comparison.compare import compare
from loadgen.errors import TargetError
from loadgen.measure.metrics import measure
from loadgen.mock.behaviour import MockBehaviour
from loadgen.processes import held_port
from loadgen.prompts.token_ids import Vocabulary
from loadgen.record import RunData
from loadgen.store import load
from loadgen.target.base import TargetFacts, TargetSpec
from loadgen.trace.schema import Trace
from tests.support.loadgen.mock import mock_in_thread
from tests.support.loadgen.runs import synthetic_run

TARGETS = ("--target-a", "grpc://127.0.0.1:1", "--target-b", "http://127.0.0.1:2/v1")
VALID = Verdict("VALID", ())
INVALID = Verdict("INVALID", (yes_or_no("lag", "requests sent late", "INVALID", "more --workers"),))
WORKLOAD = ("--dataset", "random", "--num-prompts", "30", "--request-rate", "20")


class Fake:
    """Runs at once; B takes half the time. Remembers what it was asked."""

    def __init__(self) -> None:
        self.played: list[tuple[str, str, str, str]] = []
        self.fails = lambda name: False
        self.changed: Callable[[str, RunData], RunData] = lambda name, run: run
        self.verdict = lambda name: VALID
        self.hook: Callable[[], None] = lambda: None
        self.vocabularies: list[Vocabulary | None] = []
        self.facts = {
            "grpc": TargetFacts("m", vocab_size=50_000, special_ids=frozenset({7})),
            "completions": TargetFacts("m"),
        }

    def __call__(
        self,
        workload: Trace,
        options: argparse.Namespace,
        folder: Path,
        *,
        spec: TargetSpec,
        salt: str,
        vocabulary: Vocabulary | None,
    ) -> Outcome:
        assert list(folder.iterdir()) == []
        self.hook()
        self.played.append((folder.name, spec.url, spec.api, salt))
        self.vocabularies.append(vocabulary)
        if self.fails(folder.name):
            raise TargetError(f"no server answers at {spec.url}")
        ttft_ms = 80 if folder.name.startswith("a") else 40
        run = synthetic_run(len(workload), noise_seed=len(self.played), ttft_ms=ttft_ms)
        run = self.changed(folder.name, replace(run, workload=workload))
        (folder / "run.json").write_text("{}")
        return Outcome(run, measure(run), self.verdict(folder.name), folder)

    async def probe(self, spec: TargetSpec) -> TargetFacts:
        return self.facts[spec.api]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    found = Fake()
    monkeypatch.setattr("loadgen.cli.ab.run_and_report", found)
    monkeypatch.setattr("loadgen.cli.ab.probe_target", found.probe)
    monkeypatch.setattr("loadgen.cli.ab.compare", partial(compare, resamples=50))
    monkeypatch.chdir(tmp_path)
    return found


def ab(*arguments: str) -> int:
    return main(["ab", "--result-dir", "out", *WORKLOAD, *arguments])


def document() -> Any:
    return json.loads(Path("out/comparison.json").read_text())


def test_sides_take_turns_with_new_prompts_for_servers_that_are_there(fake: Fake) -> None:
    assert ab(*TARGETS, "--repeats", "3") == 0
    assert [name for name, *_ in fake.played] == ["a-1", "b-1", "b-2", "a-2", "a-3", "b-3"]
    assert {(name[0], url, api) for name, url, api, _ in fake.played} == {
        ("a", "grpc://127.0.0.1:1", "grpc"),
        ("b", "http://127.0.0.1:2/v1", "completions"),
    }
    assert len({salt for *_, salt in fake.played}) == 6, "both addresses may be of one server, with its cache"
    assert document()["repeats"] == 3
    assert document()["versus"][0]["figures"]["ttft_p50"]["effect"] < 0.75
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {name for name, *_ in fake.played}


def test_prompts_of_two_invocations_differ_also_with_a_salt_given(fake: Fake) -> None:
    for out in ("first", "second"):
        assert main(["ab", "--result-dir", out, *WORKLOAD, *TARGETS, "--repeats", "1", "--prompt-salt", "mine"]) == 0
    salts = {salt for *_, salt in fake.played}
    assert len(salts) == 4
    assert all(salt.startswith("mine") for salt in salts)


def test_both_sides_draw_from_one_vocabulary(fake: Fake) -> None:
    assert ab(*TARGETS, "--repeats", "1") == 0
    assert fake.vocabularies == [Vocabulary(30_000, frozenset({7}))] * 2
    Path("out").rename("before")
    assert ab(*TARGETS, "--repeats", "1", "--vocab-size", "100") == 0
    assert fake.vocabularies[2:] == [Vocabulary(100, frozenset({7}))] * 2
    Path("out").rename("once more")
    assert ab(*TARGETS, "--repeats", "1", "--prompt-mode", "text") == 0
    assert fake.vocabularies[4:] == [None, None]


def test_two_apis_are_measured_with_one_vocabulary_and_no_salt_is_pinned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = MockBehaviour(ttft_s=0.01, itl_s=0.0)
    with mock_in_thread("grpc", quick) as first, mock_in_thread("openai", replace(quick, vocab_size=500)) as second:
        flags = ("--repeats", "1", "--num-prompts", "10", "--random-input-len", "8", "--random-output-len", "6")
        assert ab("--target-a", first.url, "--target-b", second.url, *flags) == 0
    settings = [load(Path("out") / name).settings for name in ("a-1", "b-1")]
    assert [(one["vocab_size"], one["pinned_salt"]) for one in settings] == [(500, False)] * 2


def test_a_side_that_fails_is_named_and_whole_pairs_are_compared(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fails = lambda name: name == "a-2"
    assert ab(*TARGETS, "--repeats", "3") == 2
    error = capsys.readouterr().err
    assert "a, run 2: no server answers at grpc://127.0.0.1:1; 1 of 3 pairs are whole and compared" in error
    assert document()["repeats"] == 1
    assert Path("out/b-2/run.json").exists()
    assert "a, run 2: no server answers" in Path("out/comparison.html").read_text()


@pytest.mark.parametrize(("stopped", "pairs"), [("b-1", 0), ("a-2", 1)])
def test_ctrl_c_compares_what_is_whole_and_has_its_own_exit_status(
    fake: Fake, capsys: pytest.CaptureFixture[str], stopped: str, pairs: int
) -> None:
    fake.changed = lambda name, run: replace(run, interrupted=name == stopped)
    assert ab(*TARGETS, "--repeats", "3") == 130
    left = "1 of 3 pairs are whole and compared" if pairs else "nothing to compare, what was run is in out"
    assert f"error: {stopped[0]}, run {stopped[2]}: stopped before its end; {left}" in capsys.readouterr().err
    assert Path("out/comparison.json").exists() == bool(pairs)


def test_an_invalid_run_is_refused_and_kept(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.verdict = lambda name: INVALID if name == "b-1" else VALID
    assert ab(*TARGETS, "--repeats", "2") == 2
    error = capsys.readouterr().err
    assert "b, run 1 is INVALID: requests sent late" in error
    assert "the runs are in out; those of valid pairs: chairlift-loadgen compare a=out/a-2 b=out/b-2" in error
    assert Path("out/b-1/run.json").exists()
    Path("out").rename("before")
    assert ab(*TARGETS, "--repeats", "1", "--force") == 0
    assert document()["forced"]
    Path("out").rename("once more")
    assert ab(*TARGETS, "--repeats", "1", "--force", "--strict") == 3


def test_a_dry_run_runs_nothing(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert ab(*TARGETS, "--dry-run") == 0
    assert fake.played == []
    assert not Path("out").exists()
    assert "30 requests" in capsys.readouterr().out


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture
def servers(tmp_path: Path, port: int) -> Path:
    """Two servers that listen and do nothing else; the second one says so."""
    script = tmp_path / "server.py"
    script.write_text(
        "import signal, socket, sys\n"
        "listener = socket.socket()\n"
        "listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        f"listener.bind(('127.0.0.1', {port}))\n"
        "print('I am', sys.argv[1], flush=True)\nlistener.listen()\nsignal.pause()\n"
    )
    path = tmp_path / "servers.toml"
    path.write_text(
        "".join(
            f'[{side}]\nlabel = "{label}"\ncommand = ["{sys.executable}", "{script}", "{label}"]\n'
            f'target = "grpc://127.0.0.1:{port}"\n'
            for side, label in (("a", "static"), ("b", "continuous"))
        )
    )
    return path


def test_servers_are_started_for_each_run_and_may_share_a_port(fake: Fake, servers: Path) -> None:
    assert ab("--servers", str(servers), "--repeats", "2") == 0
    logs = {path.name: path.read_text().strip() for path in Path("out").glob("*.log")}
    assert logs == {
        f"{side}-{pair}-server.log": f"I am {label}"
        for side, label in (("a", "static"), ("b", "continuous"))
        for pair in ("probe", 1, 2)
    }
    assert len({salt for *_, salt in fake.played}) == 2, "each server is new and has nothing in its cache"
    assert document()["baseline"] == "static"


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(
    fake: Fake, servers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.write_text(servers.read_text().replace('"continuous"]', '"continuous", "--no-such-flag"]'))
    (servers.parent / "server.py").write_text(
        "import sys\nif len(sys.argv) > 2: sys.exit('no such flag')\n" + (servers.parent / "server.py").read_text()
    )
    assert ab("--servers", str(servers)) == 2
    assert "continuous: the server ended with status 1 while starting: no such flag" in capsys.readouterr().err
    assert fake.played == []


def test_sigterm_stops_the_server_too(fake: Fake, servers: Path, port: int) -> None:
    fake.hook = lambda: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    assert ab("--servers", str(servers)) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--target-a", "grpc://h:1"), "needs --target-a and --target-b, or --servers"),
        ((), "needs --target-a and --target-b, or --servers"),
        ((*TARGETS, "--servers", "file"), "leave --target-a and --target-b out"),
        ((*TARGETS, "--label-a", "b"), "both sides are called 'b'"),
        (("--target-a", "ftp://h:1", "--target-b", "grpc://h:1"), "ftp://h:1"),
        ((*TARGETS, "--max-retries", "1"), "--max-retries needs targets"),
        (("--servers", "nowhere.toml"), "--servers nowhere.toml: No such file"),
    ],
)
def test_bad_arguments_are_named(
    arguments: tuple[str, ...], why: str, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ab(*arguments) == 2
    assert why in capsys.readouterr().err
    assert fake.played == []
