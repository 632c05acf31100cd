"""The step loop without threads: tests run its iterations one by one."""

import itertools
import json
from pathlib import Path

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.errors import EngineDraining, QueueFull
from engine.interfaces import (
    AdmissionReport,
    Cancel,
    Command,
    DrainReport,
    Fence,
    FencePassed,
    GrantCredit,
    Inbox,
    Report,
    StepReport,
    Submit,
)
from engine.serving.step_log import StepLog
from engine.step_loop import IDLE_TURN_S, StepLoop
from tests.support.engine.fake_model import FakeModel, FakeModelRunner

MODEL = FakeModel(end_probability=0.0)


class RecordingRunner(FakeModelRunner):
    """Records its calls: +n for the launch of step n, -n for its collection."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        super().__init__(MODEL, num_blocks=num_blocks, block_size=block_size)
        self.calls: list[int] = []

    def launch(self, plan: SchedulerOutput) -> None:
        super().launch(plan)
        self.calls.append(plan.step)

    def collect(self) -> ModelRunnerOutput:
        result = super().collect()
        self.calls.append(-result.step)
        return result


class Bench:
    """A step loop with a manual clock; records its reports."""

    def __init__(self, step_log: StepLog | None = None, **overrides: int) -> None:
        fields = {
            "num_blocks": 32,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
        }
        config = SchedulerConfig(**{**fields, **overrides})  # type: ignore[arg-type]
        self.inbox = Inbox()
        self.reports: list[Report] = []
        self.now_s = 1000.0
        self.scheduler = Scheduler(config)
        self.runner = RecordingRunner(num_blocks=config.num_blocks, block_size=config.block_size)
        self.loop = StepLoop(
            self.scheduler,
            self.runner,
            self.inbox,
            self.reports.append,
            on_step=step_log.write if step_log is not None else None,
            clock=lambda: self.now_s,
        )

    def submit(self, *requests: Request) -> None:
        self.inbox.put(Submit(requests))

    def cancel(self, *ids: int, reason: EndReason = EndReason.CANCELLED) -> None:
        self.inbox.put(Cancel(tuple(map(RequestId, ids)), reason))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()

    @property
    def tokens(self) -> dict[int, int]:
        """Output tokens reported, by request."""
        counts: dict[int, int] = {}
        for report in self.reports:
            for output in report.outputs if isinstance(report, StepReport) else ():
                counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
        return counts

    @property
    def reasons(self) -> dict[int, EndReason]:
        return {
            output.request_id: output.completion.reason
            for report in self.reports
            if isinstance(report, StepReport)
            for output in report.outputs
            if output.completion is not None
        }

    @property
    def admissions(self) -> list[AdmissionReport]:
        return [report for report in self.reports if isinstance(report, AdmissionReport)]


def request(request_id: int, num_prompt: int = 3, max_tokens: int = 8, **fields: object) -> Request:
    params = SamplingParams(seed=0, max_tokens=max_tokens)
    return Request(RequestId(request_id), (request_id,) * num_prompt, params, arrival_s=1000.0, **fields)  # type: ignore[arg-type]


def test_each_turn_is_one_step_and_reports_once() -> None:
    bench = Bench()
    bench.submit(request(1), request(2))
    bench.turns(8)
    assert bench.tokens == {1: 8, 2: 8}
    assert bench.reasons == {1: EndReason.MAX_TOKENS, 2: EndReason.MAX_TOKENS}
    steps = [report for report in bench.reports if isinstance(report, StepReport)]
    assert [report.snapshot.engine_step for report in steps] == list(range(1, 9))
    assert bench.reports[0] == AdmissionReport((RequestId(1), RequestId(2)), ())


def test_idle_turns_count_as_turns_but_not_as_steps() -> None:
    bench = Bench()
    bench.turns(3)
    assert (bench.loop.snapshot.loop_turns, bench.loop.snapshot.engine_step) == (3, 0)
    assert bench.reports == []


def test_cancels_free_slots_for_requests_submitted_before_them() -> None:
    bench = Bench(max_num_seqs=1, max_waiting=1)
    bench.submit(request(1))
    bench.turns(1)
    bench.submit(request(2))
    bench.turns(1)
    bench.submit(request(3))
    bench.cancel(2)
    bench.turns(1)
    assert [report.rejected for report in bench.admissions] == [(), (), ()]
    assert bench.reasons == {2: EndReason.CANCELLED}


def test_a_cancel_reaches_a_request_of_the_same_turn() -> None:
    bench = Bench()
    bench.submit(request(1), request(2))
    bench.cancel(1, reason=EndReason.DEADLINE)
    bench.turns(2)
    assert bench.reasons == {1: EndReason.DEADLINE}
    assert bench.tokens[1] == 0
    assert bench.tokens[2] == 2


def test_rejections_are_reported_before_the_step_that_follows() -> None:
    bench = Bench(max_num_seqs=1, max_waiting=1)
    bench.submit(request(1))
    bench.turns(1)
    bench.submit(request(2), request(3))
    bench.turns(1)
    admission, step = bench.reports[-2:]
    assert isinstance(admission, AdmissionReport)
    assert admission.accepted == (2,)
    assert [(rejected, type(error)) for rejected, error in admission.rejected] == [(3, QueueFull)]
    assert isinstance(step, StepReport)


def test_a_request_pauses_without_credit_and_resumes_with_new_credit() -> None:
    bench = Bench()
    bench.submit(request(1, token_credit=3))
    bench.turns(6)
    assert bench.tokens == {1: 3}
    step = bench.loop.snapshot.engine_step
    bench.turns(2)
    assert bench.loop.snapshot.engine_step == step  # paused: no steps are counted
    bench.inbox.put(GrantCredit(((RequestId(1), 2), (RequestId(50), 1))))
    bench.turns(4)
    assert bench.tokens == {1: 5}


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_the_deadline_of_a_paused_request_ends_it(max_steps_in_flight: int) -> None:
    bench = Bench(max_steps_in_flight=max_steps_in_flight)
    bench.submit(request(1, token_credit=1, deadline_s=1005.0))
    bench.turns(4)
    assert (bench.tokens, bench.reasons) == ({1: 1}, {})
    bench.now_s = 1005.0
    bench.turns(1)
    assert bench.reasons == {1: EndReason.DEADLINE}
    assert bench.scheduler.stats().num_free_blocks == 32


def test_drain_rejects_new_requests_and_returns_when_the_rest_is_done() -> None:
    bench = Bench()
    bench.submit(request(1), request(2))
    bench.turns(1)
    bench.loop.drain(30.0)
    bench.submit(request(3))
    bench.loop.run()
    assert (bench.loop.num_drained, bench.loop.num_cut) == (2, 0)
    assert bench.tokens == {1: 8, 2: 8}
    assert DrainReport(30.0) in bench.reports
    ((rejected, error),) = bench.admissions[-1].rejected
    assert rejected == 3
    assert isinstance(error, EngineDraining)


def test_drain_cancels_open_requests_after_its_grace() -> None:
    bench = Bench()
    bench.submit(request(1, max_tokens=2), request(2, token_credit=1))
    bench.turns(1)
    bench.loop.drain(5.0)
    bench.turns(2)
    bench.now_s += 5.0
    bench.loop.run()
    assert (bench.loop.num_drained, bench.loop.num_cut) == (1, 1)
    assert bench.reasons == {1: EndReason.MAX_TOKENS, 2: EndReason.CANCELLED}


def test_stop_returns_with_requests_open() -> None:
    bench = Bench()
    bench.submit(request(1))
    bench.turns(1)
    bench.loop.stop()
    bench.loop.run()
    assert bench.reasons == {}
    assert (bench.loop.num_drained, bench.loop.num_cut) == (0, 1)


def test_the_step_log_has_one_line_per_step_with_the_documented_fields(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    bench = Bench(step_log=log, num_blocks=8, max_model_len=32)
    bench.submit(request(1, num_prompt=10, max_tokens=12), request(2, num_prompt=10, max_tokens=12))
    while len(bench.reasons) < 2:
        bench.turns(1)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    first = lines[0]
    assert first["scheduled"] == {"1": 10, "2": 6}
    assert (first["num_tokens"], first["running"], first["waiting"]) == (16, 2, 0)
    assert all(line["blocks_used"] + line["blocks_free"] == 8 for line in lines)
    assert all(min(line["schedule_ms"], line["execute_ms"], line["update_ms"]) >= 0 for line in lines)
    assert {key: value for line in lines for key, value in line["finished"].items()} == {
        "1": "MAX_TOKENS",
        "2": "MAX_TOKENS",
    }
    usage = {key: tuple(value) for line in lines for key, value in line["usage"].items()}
    assert usage == {"1": (10, 0, 12), "2": (10, 0, 12)}  # prompt, cached, output
    # Two requests of 22 tokens do not fit 8 blocks of 4: preemptions are logged, and finished requests are not.
    preempted = [request_id for line in lines for request_id in line["preempted"]]
    assert len(preempted) == bench.scheduler.stats().num_preemptions_total > 0


class TestTwoStepsInFlight:
    def test_the_next_step_is_launched_before_one_is_collected(self) -> None:
        bench = Bench(max_steps_in_flight=2)
        bench.submit(request(1, max_tokens=4))
        bench.turns(3)
        assert bench.runner.calls == [1, 2, -1, 3, -2]

    def test_a_token_is_reported_when_its_step_has_ended(self) -> None:
        bench = Bench(max_steps_in_flight=2)
        bench.submit(request(1, max_tokens=4))
        counts = []
        for _ in range(5):
            bench.turns(1)
            counts.append(bench.tokens.get(1, 0))
        assert counts == [0, 1, 2, 3, 4]
        assert bench.reasons == {1: EndReason.MAX_TOKENS}

    def test_all_steps_are_collected_when_no_step_is_left_to_launch(self) -> None:
        """The last step has no successor, and a plan without rows has no work to overlap with."""
        bench = Bench(max_steps_in_flight=2)
        bench.submit(request(1, max_tokens=1))
        bench.turns(2)
        assert bench.tokens == {1: 1}
        assert bench.runner.calls == [1, 2, -1, -2]
        calls = len(bench.runner.calls)
        bench.turns(3)  # the runner learns of the removed request with the next plan that has rows
        assert len(bench.runner.calls) == calls

    def test_only_idle_turns_wait_for_commands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        waits: list[float] = []
        drain = Inbox.drain
        monkeypatch.setattr(Inbox, "drain", lambda self, timeout_s: waits.append(timeout_s) or drain(self, 0.0))
        bench = Bench(max_steps_in_flight=2)
        bench.turns(1)
        bench.submit(request(1, max_tokens=3, token_credit=2))
        bench.turns(6)
        assert waits[0] > 0
        assert waits[2:4] == [0.0, 0.0]  # after the launch, and while the second token is in flight
        assert min(waits[-2:]) > 0
        assert bench.tokens == {1: 2}

    def test_a_slot_freed_by_the_last_step_is_filled_without_a_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The step that ends the answer is collected together with an empty plan, which was made before it ended."""
        waits: list[float] = []
        drain = Inbox.drain
        bench = Bench(max_steps_in_flight=2, max_num_seqs=1)
        bench.submit(request(1, max_tokens=1), request(2, max_tokens=1))
        bench.turns(2)
        assert bench.tokens == {1: 1}
        monkeypatch.setattr(Inbox, "drain", lambda self, timeout_s: waits.append(timeout_s) or drain(self, 0.0))
        bench.turns(2)
        assert bench.tokens == {1: 1, 2: 1}
        assert waits == [0.0, 0.0]

    def test_turns_are_counted_once_whatever_they_collect(self) -> None:
        bench = Bench(max_steps_in_flight=2)
        bench.submit(request(1, max_tokens=2))
        for turn in range(1, 7):
            bench.turns(1)
            assert bench.loop.snapshot.loop_turns == turn
        assert bench.loop.snapshot.engine_step == 2

    def test_a_cancel_takes_effect_with_the_step_in_flight(self) -> None:
        bench = Bench(max_steps_in_flight=2)
        bench.submit(request(1), request(2))
        bench.turns(2)
        bench.cancel(1)
        bench.turns(1)
        assert bench.reasons == {1: EndReason.CANCELLED}
        assert bench.tokens == {1: 1, 2: 2}  # the second token of request 1 was in flight and is dropped
        bench.turns(8)
        assert bench.tokens == {1: 1, 2: 8}
        assert bench.scheduler.stats().num_free_blocks == 32

    @pytest.mark.parametrize("drains", [True, False])
    def test_run_returns_with_nothing_in_flight(self, drains: bool) -> None:
        bench = Bench(max_steps_in_flight=2)
        bench.submit(request(1), request(2))
        bench.turns(2)
        if drains:
            bench.loop.drain(30.0)
        else:
            bench.loop.stop()
        bench.loop.run()
        assert sum(bench.runner.calls) == 0
        assert bench.tokens == ({1: 8, 2: 8} if drains else {1: 2, 2: 2})
        assert bench.loop.num_drained == (2 if drains else 0)

    def test_the_time_of_a_step_begins_when_the_previous_step_has_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A clock that moves by 1 ms whenever it is read: at the start and end of scheduling, after collection, and
        after the update.
        """
        ticks = itertools.count(1)
        monkeypatch.setattr("engine.step_loop.time.perf_counter_ns", lambda: next(ticks) * 1_000_000)
        log = StepLog(tmp_path / "steps.jsonl")
        bench = Bench(step_log=log, max_steps_in_flight=2)
        bench.submit(request(1, max_tokens=3))
        bench.turns(4)
        log.close()
        lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
        times = [(line["t_ms"], line["schedule_ms"], line["execute_ms"], line["update_ms"]) for line in lines]
        # Read at 1 2 (schedule 1), 3 4 (schedule 2), 5 6 (1 ends), 7 8 (schedule 3), 9 10 (2 ends), 11 12 (an empty
        # plan), 13 14 (3 ends), 15 16 (the empty plan).
        assert times == [(1, 1, 3, 1), (5, 0, 4, 1), (9, 0, 4, 1), (13, 0, 2, 1)]
        assert [line["num_tokens"] for line in lines] == [3, 1, 1, 0]
        assert (bench.loop.snapshot.step_us, bench.loop.snapshot.execute_us) == (5000, 4000)

    def test_finished_requests_are_not_logged_as_preempted(self, tmp_path: Path) -> None:
        """A stop is known only after the next launch, so that the plan after that one removes the request."""
        log = StepLog(tmp_path / "steps.jsonl")
        bench = Bench(step_log=log, num_blocks=8, max_model_len=32, max_steps_in_flight=2)
        bench.submit(request(1, num_prompt=10, max_tokens=12), request(2, num_prompt=10, max_tokens=12))
        bench.submit(request(3, max_tokens=1), request(4, max_tokens=2))
        while len(bench.reasons) < 4:
            bench.turns(1)
        bench.submit(request(5, max_tokens=1))
        bench.turns(6)
        log.close()
        lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
        preempted = [request_id for line in lines for request_id in line["preempted"]]
        assert len(preempted) == bench.scheduler.stats().num_preemptions_total > 0


@pytest.mark.parametrize("num_prompt", [1, 2, 16])
def test_prompt_tokens_are_counted_for_the_throughput_line(num_prompt: int) -> None:
    bench = Bench()
    bench.submit(request(1, num_prompt=num_prompt))
    bench.turns(3)
    assert bench.loop.snapshot.num_prompt_tokens_total == (num_prompt if num_prompt > 1 else 0)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_a_fence_passes_once_all_steps_launched_before_it_have_ended(max_steps_in_flight: int, num_turns: int) -> None:
    bench = Bench(max_steps_in_flight=max_steps_in_flight)
    calls = bench.runner.calls
    bench.submit(request(1))
    bench.turns(num_turns)
    launched_before = [step for step in calls if step > 0]
    collected: list[list[int]] = []

    def record(report: Report) -> None:
        if report == FencePassed(7):
            collected.append([-step for step in calls if step < 0])

    bench.loop._outbox = record
    bench.inbox.put(Fence(7))
    bench.turns(12)  # beyond the end of the request
    assert len(collected) == 1
    assert set(launched_before) <= set(collected[0])


class PatientInbox(Inbox):
    """Records how long the loop would wait for commands; nobody waits."""

    def drain(self, timeout_s: float) -> list[Command]:
        self.last_wait_s = timeout_s
        return super().drain(0.0)


def test_the_loop_waits_only_while_nothing_runs_until_the_next_deadline_and_never_long() -> None:
    """Its turns must go on: they tell the watchdog and frontends that it does not hang."""
    bench, inbox = Bench(), PatientInbox()
    bench.loop._inbox = bench.inbox = inbox
    bench.submit(request(1, token_credit=6, deadline_s=bench.now_s + 600.0))
    waits_s = []
    for passed_s in (0.0,) * 10 + (599.99, 1.0, 0.0, 0.0):
        bench.now_s += passed_s
        bench.turns(1)
        waits_s.append(inbox.last_wait_s)
    assert bench.reasons == {1: EndReason.DEADLINE}
    assert waits_s == pytest.approx([IDLE_TURN_S, *[0.0] * 5, *[IDLE_TURN_S] * 4, 0.01, 0.0, *[IDLE_TURN_S] * 2])
