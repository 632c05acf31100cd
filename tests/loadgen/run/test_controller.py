"""Whole runs: worker processes, sockets, mock servers that keep a record of their own."""

import asyncio
import hashlib
import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.errors import OptionError, TargetError
from loadgen.mock.behaviour import MockAnswer, MockBehaviour, MockMessage
from loadgen.mock.engine import MockEngine
from loadgen.mock.running import mock_in_processes
from loadgen.prompts.token_ids import PromptMaker, Vocabulary
from loadgen.record import ABSENT, LiveView, RunData, Status
from loadgen.run.controller import RunOptions, run_workload
from loadgen.run.shards import cancellations
from loadgen.target.base import TargetSpec
from loadgen.trace.schema import Accounting, Blocks, Trace, workload_digest
from tests.support.loadgen.mock import mock_in_thread

QUICK = MockBehaviour(ttft_s=0.02, itl_s=0.002)
ENDLESS, NEVER_S = 100, 3600.0


class SometimesEndless(MockBehaviour):
    """Answers with this number of tokens have one message and no end."""

    def answer(self, number: int, num_asked: int) -> MockAnswer:
        if num_asked != ENDLESS:
            return super().answer(number, num_asked)
        return MockAnswer((MockMessage(0, 1, 0.0), MockMessage(1, num_asked - 1, NEVER_S)), False)


@pytest.fixture(autouse=True)
def no_ceiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def workload(count: int, rate: float, *, input_tokens: int = 20, output_tokens: int = 6, blocks: bool = False) -> Trace:
    numbers = np.arange(count)
    block_ids = np.stack([np.zeros(count, dtype=np.int64), 1 + numbers], axis=1).ravel()
    return Trace(
        name="made up",
        format="jsonl",
        digest="d" * 64,
        arrival_s=numbers / rate,
        input_tokens=np.full(count, input_tokens),
        output_tokens=output_tokens + numbers % 3,
        rows=numbers,
        accounting=Accounting(count),
        blocks=Blocks(block_ids, 2 * np.arange(count + 1), 16) if blocks else None,
    )


def spec(url: str, api: Any = "grpc", **others: Any) -> TargetSpec:
    return TargetSpec(url, api, prompt_mode="text" if api == "chat" else "ids", **others)


def statuses(run: RunData) -> dict[Status, int]:
    return {
        Status(int(value)): int(count)
        for value, count in zip(*np.unique(run.requests["status"], return_counts=True), strict=True)
    }


def endless_from(trace: Trace, first: int, step: int = 1) -> Trace:
    """The same requests, but every `step`-th from `first` on has no end."""
    output_tokens = trace.output_tokens.copy()
    output_tokens[first::step] = ENDLESS
    return replace(trace, output_tokens=output_tokens)


def ctrl_c_once(
    is_time: Callable[[LiveView], bool], number: signal.Signals = signal.SIGINT
) -> Callable[[LiveView], None]:
    """For `on_progress`: a signal for the whole group, as Ctrl-C in a terminal or `timeout`, as soon as it is time."""
    pressed: list[LiveView] = []

    def look(view: LiveView) -> None:
        if not pressed and is_time(view):
            pressed.append(view)
            for process in (*multiprocessing.active_children(), multiprocessing.current_process()):
                os.kill(process.pid or 0, number)

    return look


def count(view: LiveView, status: Status) -> int:
    return int((view.requests["status"] == status).sum())


@pytest.mark.parametrize("api", ["grpc", "completions"])
def test_what_was_planned_is_what_the_server_sees_and_what_is_noted(api: Any) -> None:
    trace = workload(40, 100, input_tokens=30, blocks=True)
    with mock_in_thread("grpc" if api == "grpc" else "openai", QUICK) as server:
        run = run_workload(trace, spec(server.url, api), RunOptions(workers=2, salt="pinned"))
        seen = server.record.answered()
    assert statuses(run) == {Status.OK: 40}
    vocabulary = Vocabulary(32_000, frozenset({31_999}) if api == "grpc" else frozenset())
    maker = PromptMaker("pinned", trace, vocabulary)
    prompts = [hashlib.sha256(maker.token_ids(index).astype("<u4").tobytes()).hexdigest() for index in range(40)]
    by_prompt = {request.prompt_sha256: request for request in seen}
    assert sorted(by_prompt) == sorted(prompts)
    rows = run.requests
    for index, prompt in enumerate(prompts):
        request = by_prompt[prompt]
        assert request.num_asked == request.num_sent == trace.output_tokens[index] == rows["num_tokens"][index]
        arrived_ns = request.arrived_ns - run.settings["start_monotonic_ns"]
        assert rows["sent_ns"][index] <= arrived_ns <= rows["first_ns"][index]
    assert rows["scheduled_ns"].tolist() == np.round(trace.arrival_s * 1e9).tolist()
    assert (rows["sent_ns"] >= rows["scheduled_ns"]).all()
    assert (rows["server_input_tokens"] == 30).all()
    assert (rows["server_output_tokens"] == trace.output_tokens).all()
    assert (rows["first_ns"] < rows["last_ns"]).all()
    assert (rows["last_ns"] <= rows["ended_ns"]).all()
    assert rows["worker"].tolist() == [0, 1] * 20
    assert run.ended_s == rows["ended_ns"].max() / 1e9
    assert len(run.chunks) == rows["num_chunks"].sum()
    for index in range(40):
        ours = run.chunks[run.chunks["request"] == index]
        assert ours["tokens"].sum() == trace.output_tokens[index]
        assert (np.diff(ours["arrived_ns"]) >= 0).all()
        assert (ours["arrived_ns"][0], ours["arrived_ns"][-1]) == (rows["first_ns"][index], rows["last_ns"][index])
    assert [(worker.worker, worker.chunks_lost, worker.exit_code) for worker in run.workers] == [(0, 0, 0), (1, 0, 0)]
    assert all(len(worker.loop_lag_ms) >= 30 for worker in run.workers)


def test_settings_say_how_it_was_run_and_no_secret() -> None:
    trace = workload(3, 100)
    with mock_in_thread("openai", QUICK) as server:
        run = run_workload(trace, spec(server.url, "completions", api_key="hidden"), RunOptions(max_concurrency=7))
        url = server.url
    settings = run.settings
    expected = {"target": url, "api": "completions", "model": "mock", "max_model_len": 1 << 20, "vocab_size": 32_000}
    expected |= {"closed_loop": False, "max_concurrency": 7, "workers": 1, "pinned_salt": False, "warnings": []}
    expected |= {"workload_digest": workload_digest(trace), "ceiling_messages_per_s": None, "text_prompts": None}
    assert {name: settings[name] for name in expected} == expected
    assert len(settings["salt"]) == 16
    assert "hidden" not in repr(settings)


def test_streams_over_http_may_be_more_than_the_usual_limit_of_files() -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    with mock_in_processes("openai", MockBehaviour(ttft_s=1.0, itl_s=0.0)) as url:
        few = sum(1 for _ in Path("/dev/fd").iterdir()) + 70  # other tests have left some open
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, usual[1]))
        try:
            run = run_workload(workload(200, 1000), spec(url, "completions"), RunOptions(workers=1, concurrency=200))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert run.errors == ()
    assert (run.requests["status"] == Status.OK).all()


def test_prompts_are_fresh_every_run_unless_the_salt_is_pinned() -> None:
    trace = workload(5, 100)
    with mock_in_thread("grpc", QUICK) as server:
        for salt in ("", "", "same", "same"):
            run_workload(trace, spec(server.url), RunOptions(salt=salt))
        seen = [request.prompt_sha256 for request in server.record.answered()]
    runs = [set(seen[start : start + 5]) for start in (0, 5, 10, 15)]
    assert not runs[0] & runs[1]
    assert runs[2] == runs[3]


def test_text_prompts_have_the_lengths_that_the_server_counts() -> None:
    behaviour = MockBehaviour(ttft_s=0.0, itl_s=0.0, overhead_tokens=9, long_word=6)
    with mock_in_thread("openai", behaviour) as server:
        run = run_workload(workload(10, 100, input_tokens=50), spec(server.url, "chat"), RunOptions(workers=2))
    assert (run.requests["server_input_tokens"] == 50).all()
    text = run.settings["text_prompts"]
    assert (text["overhead_tokens"], text["tokens_per_word"], text["mismatch"]) == (10, 1.0, 0.0)


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    with mock_in_thread("grpc", SometimesEndless(ttft_s=0.02, itl_s=0.002)) as server:
        run = run_workload(workload(24, 0.001), spec(server.url), RunOptions(concurrency=5, workers=2))
        full = ctrl_c_once(lambda view: count(view, Status.OK) == 14 and server.record.num_open == 5)
        trace = endless_from(workload(24, 0.001), 14)
        broken_off = run_workload(trace, spec(server.url), RunOptions(concurrency=5, workers=2), full)
        assert server.record.max_open == 5
    assert statuses(run) == {Status.OK: 24}
    assert run.settings["closed_loop"] is True
    assert (run.requests["scheduled_ns"] >= 0).all()
    assert statuses(broken_off) == {Status.OK: 14, Status.IN_FLIGHT: 5, Status.UNSENT: 5}


def test_errors_of_all_workers_are_gathered_under_their_texts() -> None:
    with mock_in_thread("grpc", MockBehaviour(ttft_s=0.0, itl_s=0.0, error_rate=0.5, seed=3)) as server:
        run = run_workload(workload(60, 200), spec(server.url), RunOptions(workers=2))
        failed = sum(request.outcome == "failed" for request in server.record.answered())
    assert statuses(run) == {Status.OK: 60 - failed, Status.ERROR: failed}
    assert sorted(set(run.errors)) == sorted(run.errors)
    broken = run.requests[run.requests["status"] == Status.ERROR]
    for row in broken:
        text = run.errors[row["error"]]
        assert text.startswith(f"INTERNAL: mock failure after {row['num_chunks']} messages")
    assert {0, 1} == set(broken["worker"])
    assert (run.requests["error"][run.requests["status"] == Status.OK] == ABSENT).all()


def test_a_share_of_the_calls_is_cancelled_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, options = workload(40, 200, output_tokens=20), RunOptions(cancel_rate=0.5, seed=1)
    trace = replace(trace, output_tokens=np.full(40, 20))
    after = cancellations(trace, options)
    num_cancelled = int((after > 0).sum())
    assert 10 <= num_cancelled <= 30
    last_ones_leave = threading.Event()

    async def until(engine: MockEngine, arrived_ns: int, due_s: float) -> None:
        while due_s > 18.5 and not last_ones_leave.is_set():  # the last token of twenty
            await asyncio.sleep(0.01)

    def look(view: LiveView) -> None:
        if len(server.record.answered()) == 40 and server.record.num_open == 40 - num_cancelled:
            last_ones_leave.set()

    monkeypatch.setattr(MockEngine, "_until", until)
    with mock_in_thread("grpc", MockBehaviour(ttft_s=0.0, itl_s=1.0)) as server:
        run = run_workload(trace, spec(server.url), options, look)
        outcomes = [request.outcome for request in server.record.answered()]
    assert ((run.requests["status"] == Status.CANCELLED) == (after > 0)).all()
    assert statuses(run) == {Status.OK: 40 - num_cancelled, Status.CANCELLED: num_cancelled}
    assert sorted(outcomes) == ["cancelled"] * num_cancelled + ["done"] * (40 - num_cancelled)
    assert (run.requests["num_tokens"] >= after)[after > 0].all()
    assert (run.requests["num_tokens"] < 20)[after > 0].all()


def test_requests_over_their_time_are_timed_out() -> None:
    timeout_s = 3.0  # the probe, too, has to end within it
    with mock_in_thread("grpc", SometimesEndless(ttft_s=0.0, itl_s=0.0)) as server:
        run = run_workload(endless_from(workload(5, 100), 0), spec(server.url, timeout_s=timeout_s))
    assert statuses(run) == {Status.TIMEOUT: 5}
    assert ((run.requests["ended_ns"] - run.requests["sent_ns"]) >= (timeout_s - 0.01) * 1e9).all()
    assert run.errors == ("no end within 3 s",)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_return_what_was_run(number: signal.Signals) -> None:
    """Six requests are answered, four are in flight, and the others are due much later."""
    broken_off: list[int] = []
    trace = endless_from(workload(2000, 20), 6)
    trace = replace(trace, arrival_s=np.where(np.arange(2000) < 10, trace.arrival_s, 1000.0 + trace.arrival_s))
    press = ctrl_c_once(lambda view: count(view, Status.OK) == 6 and count(view, Status.IN_FLIGHT) == 4, number)
    with mock_in_thread("grpc", SometimesEndless(ttft_s=0.3, itl_s=0.0)) as server:
        run = run_workload(trace, spec(server.url), RunOptions(workers=2), press, on_interrupt=broken_off.append)
        while server.record.num_open:  # it hears of it by and by
            time.sleep(0.01)
    assert run.interrupted
    assert statuses(run) == {Status.OK: 6, Status.IN_FLIGHT: 4, Status.UNSENT: 1990}
    assert broken_off == [4]
    assert run.ended_s < 1000  # before the others were due
    assert [worker.exit_code for worker in run.workers] == [0, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_worker_that_dies_is_reported_and_its_requests_fail() -> None:
    """Ten of its requests are answered, nine are in flight, the last one is due much later."""

    def kill_one(view: LiveView) -> None:
        victims = [child for child in multiprocessing.active_children() if child.name == "worker-1"]
        rows = view.requests[1::2]
        under_way = rows[(rows["status"] == Status.IN_FLIGHT) & (rows["num_chunks"] == 1)]
        if victims and (rows["status"] == Status.OK).sum() == 10 and len(under_way) == 9:
            os.kill(victims[0].pid or 0, signal.SIGKILL)

    trace = endless_from(workload(40, 50), 21, 2)
    trace.arrival_s[-1] = 1000.0
    with mock_in_thread("grpc", SometimesEndless(ttft_s=0.02, itl_s=0.002)) as server:
        run = run_workload(trace, spec(server.url), RunOptions(workers=2), kill_one)
    assert [worker.exit_code for worker in run.workers] == [0, -signal.SIGKILL]
    ours = run.requests["worker"] == 1
    assert (run.requests["status"][~ours] == Status.OK).all()
    lost = run.requests[ours & (run.requests["status"] == Status.ERROR)]
    assert len(lost) == 10
    assert (run.requests["status"][ours] == Status.OK).sum() == 10
    assert {run.errors[number] for number in lost["error"]} == {"worker 1 died with exit code -9"}
    assert len(run.chunks) == run.requests["num_chunks"].sum()


def test_progress_is_shown_while_the_run_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of the answers leaves only when the first half has been seen."""
    seen: list[tuple[float, int]] = []

    async def until(engine: MockEngine, arrived_ns: int, due_s: float) -> None:
        num_done = sum(request.outcome == "done" for request in engine.record.answered())
        while num_done >= 100 and (len(seen) <= 3 or not any(done > 0 for _, done in seen)):
            await asyncio.sleep(0.01)

    def look(view: LiveView) -> None:
        assert view.duration_s == 1.99
        seen.append((view.elapsed_s, int((view.requests["status"] == Status.OK).sum())))

    monkeypatch.setattr(MockEngine, "_until", until)
    with mock_in_thread("grpc", QUICK) as server:
        run = run_workload(workload(200, 100), spec(server.url), None, look)
    elapsed_s = [elapsed for elapsed, _ in seen]
    assert elapsed_s[0] >= -0.3
    assert min(np.diff(elapsed_s)[:-1]) > 0.2  # about four times a second, and once more at the end
    assert len(seen) > 3
    assert not any(done for elapsed, done in seen if elapsed < 0)
    assert seen[-1][1] == 200
    assert any(0 < done < 200 for _, done in seen)
    busy = run.settings["host_busy"]
    assert busy is None or 0 < busy["mean"] <= busy["peak"] <= 1


def test_what_the_server_says_of_itself_is_told_before_anything_is_run() -> None:
    told: list[tuple[int | None, int]] = []
    behaviour = MockBehaviour(ttft_s=0.02, itl_s=0.0, max_model_len=77)
    with mock_in_thread("grpc", behaviour) as server:
        run_workload(
            workload(3, 100),
            spec(server.url),
            on_opened=lambda facts: told.append((facts.max_model_len, len(server.record.answered()))),
        )
    assert told == [(77, 0)]


def test_a_throttled_worker_shows_as_loop_lag_and_late_sending() -> None:
    run = run_workload(workload(50, 40), spec("null:?busy_ms=60", "null"))  # 2.4 s of work a second
    (worker,) = run.workers
    assert np.quantile(worker.loop_lag_ms, 0.5) > 15
    assert worker.cpu_share.max() > 0
    late_ms = (run.requests["sent_ns"] - run.requests["scheduled_ns"]) / 1e6
    assert late_ms[-1] > 1000  # 50 requests of 60 ms in 1.25 s


def test_nobody_listening_is_said_and_no_process_is_left() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"grpc://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(TargetError, match="no server answers at"):
            run_workload(workload(3, 10), spec(url), RunOptions(workers=2))
    assert multiprocessing.active_children() == []


def test_prompts_are_made_of_the_vocabulary_that_is_given() -> None:
    trace, vocabulary = workload(3, 50), Vocabulary(12, first_id=10)
    with mock_in_thread("grpc", MockBehaviour(ttft_s=0.01, itl_s=0.0)) as server:
        run = run_workload(trace, spec(server.url), RunOptions(salt="salt", vocabulary=vocabulary))
        seen = {request.prompt_sha256 for request in server.record.answered()}
    maker = PromptMaker("salt", trace, vocabulary)
    assert seen == {hashlib.sha256(maker.token_ids(index).astype("<u4").tobytes()).hexdigest() for index in range(3)}
    assert run.settings["vocab_size"] == 12


def test_what_cannot_be_run_is_refused_before_anything_is_started() -> None:
    with pytest.raises(OptionError, match="no requests"):
        run_workload(workload(0, 1), spec("null:", "null"))
    with pytest.raises(TargetError, match="no address for --api grpc"):
        run_workload(workload(1, 1), spec("http://host/v1"))
    with (
        mock_in_thread("grpc", MockBehaviour(vocab_size=2, ttft_s=0.0)) as server,
        pytest.raises(OptionError, match="a vocabulary of 2 tokens without the 1 special ones has 1 left"),
    ):
        run_workload(workload(1, 1), spec(server.url))
