import numpy as np

from loadgen.record import ABSENT, CHUNK, Status, new_requests
from loadgen.run.recorder import MAX_ERRORS, CallNotes, Recorder
from loadgen.run.shared_arrays import PROGRESS


class Bench:
    """A recorder with room for some messages, on a clock that the test moves."""

    def __init__(self, room: int = 10) -> None:
        self.now_ns = 0
        self.requests = new_requests(3)
        self.chunks = np.zeros(room, dtype=CHUNK)
        self.progress = np.zeros(1, dtype=PROGRESS)
        self.errors: list[str] = []
        self.recorder = Recorder(self.requests, self.chunks, self.progress, self.errors.append, lambda: self.now_ns)
        self.recorder.start(1000)
        self.cancelled = 0

    def notes(self, request: int, cancel_after: int = 0) -> CallNotes:
        def cancel() -> None:
            self.cancelled += 1

        return CallNotes(self.recorder, request, cancel_after, cancel)


def test_a_call_is_written_down_as_it_goes() -> None:
    bench = Bench()
    notes = bench.notes(1)
    bench.now_ns = 1500
    notes.sent()
    assert (bench.requests["status"][1], bench.requests["sent_ns"][1]) == (Status.IN_FLIGHT, 500)
    notes.started(100, 64)
    for now_ns, tokens in ((2000, 1), (2500, 3), (2600, 2)):
        bench.now_ns = now_ns
        notes.tokens(tokens)
    notes.finished(6, queued_us=7, prefill_us=8, num_preemptions=9)
    bench.now_ns = 3000
    bench.recorder.ended(1, Status.OK)
    row = {name: int(bench.requests[name][1]) for name in bench.requests.dtype.names}
    assert row == {
        "status": Status.OK,
        "worker": ABSENT,
        "scheduled_ns": ABSENT,
        "sent_ns": 500,
        "retry_due_ns": ABSENT,
        "resent_ns": ABSENT,
        "num_retries": 0,
        "retry_lag_ns": ABSENT,
        "first_ns": 1000,
        "last_ns": 1600,
        "ended_ns": 2000,
        "num_chunks": 3,
        "num_tokens": 6,
        "server_input_tokens": 100,
        "server_output_tokens": 6,
        "server_cached_tokens": 64,
        "server_queued_us": 7,
        "server_prefill_us": 8,
        "server_preemptions": 9,
        "error": ABSENT,
        "service_class": ABSENT,
    }
    assert bench.chunks[:3].tolist() == [(1, 1, 1000), (1, 3, 1500), (1, 2, 1600)]
    assert bench.progress.tolist() == [(3, 0)]
    assert (new_requests(3)[[0, 2]] == bench.requests[[0, 2]]).all()


def test_the_latest_of_several_retries_is_kept() -> None:
    bench = Bench()
    notes = bench.notes(0)
    notes.sent()
    for due_ns, late_ns in ((2000, 30), (3000, 500), (4000, 20)):
        bench.recorder.will_retry(0, due_ns)
        bench.now_ns = 1000 + due_ns + late_ns
        notes.sent()
    row = bench.requests[0]
    assert (row["sent_ns"], row["retry_due_ns"], row["resent_ns"]) == (-1000, 4000, 4020)
    assert (row["num_retries"], row["retry_lag_ns"]) == (3, 500)


def test_messages_without_room_are_counted_and_their_tokens_kept() -> None:
    bench = Bench(room=2)
    notes = bench.notes(0)
    for bench.now_ns in (1001, 1002, 1003, 1004):
        notes.tokens(5)
    assert bench.progress.tolist() == [(2, 2)]
    assert (bench.requests["num_tokens"][0], bench.requests["num_chunks"][0]) == (20, 4)
    assert bench.requests["last_ns"][0] == 4


def test_a_call_is_cancelled_once_after_its_tokens() -> None:
    bench = Bench()
    notes = bench.notes(0, cancel_after=3)
    notes.tokens(2)
    assert bench.cancelled == 0
    notes.tokens(2)
    notes.tokens(2)
    assert (bench.cancelled, notes.is_cancelled) == (1, True)


def test_error_texts_are_numbered_once_and_never_without_end() -> None:
    bench = Bench()
    for request, text in ((0, "a"), (1, "b"), (2, "a")):
        bench.recorder.ended(request, Status.ERROR, text)
    assert bench.requests["error"].tolist() == [0, 1, 0]
    assert bench.errors == ["a", "b"]
    for number in range(2 * MAX_ERRORS):
        bench.recorder.ended(0, Status.ERROR, f"request {number} failed")
    assert len(bench.errors) == MAX_ERRORS + 1
    assert bench.errors[-1] == "request N failed"  # one more number is no other error
    assert bench.requests["error"][0] == MAX_ERRORS
    for number in range(2 * MAX_ERRORS):
        bench.recorder.ended(0, Status.ERROR, f"request {'I' * number} failed")
    assert len(bench.errors) == 2 * MAX_ERRORS + 1
    assert bench.errors[-1] == "other errors"
    assert bench.requests["error"][0] == 2 * MAX_ERRORS
