"""kill -9 of real engines under real answers: the client's stream continues with the tokens of an undisturbed run.

Greedy answers may differ from an undisturbed run where two tokens are equally good, because matrix products may sum in
another order in another batch; these prompts have no such places (`test_pair.py` counts them).
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift import Client, GenerationError
from chairlift.v1 import generation_service_pb2 as pb
from tests.hang import HANG_S
from tests.support.pair import Processes, with_long_context
from tests.support.processes import engine_pids

NUM_POSITIONS = 200_000
"""Context length: minutes of tokens."""

SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 12}},
    "required": ["names"],
    "additionalProperties": False,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 400, "ignore_end_token": True},
    "sampled": {"temperature": 1.0, "seed": 5, "max_tokens": 400, "ignore_end_token": True},
    "penalties": {
        "temperature": 0.8,
        "seed": 6,
        "max_tokens": 400,
        "ignore_end_token": True,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "min_p": 0.02,
    },
    "structured": {"temperature": 1.0, "seed": 7, "max_tokens": 400, "json_schema": SCHEMA},
    "stopped": {"temperature": 1.0, "seed": 8, "max_tokens": 400, "ignore_end_token": True, "stop_texts": ["zzzz"]},
}


def answer(client: Client, name: str, on_chunk: Callable[[int], None]) -> tuple[list[int], str, pb.Finished]:
    """One whole stream; checks that no index is missing or twice."""
    token_ids: list[int] = []
    text = ""
    stream = client.stream("Once upon a time", return_token_ids=True, timeout_s=HANG_S, **REQUESTS[name])
    for chunk in stream:
        assert chunk.first_token_index == len(token_ids)
        token_ids += chunk.token_ids
        text += chunk.text
        on_chunk(len(token_ids))
    assert stream.finished is not None
    assert stream.finished.usage.num_output_tokens == len(token_ids)
    return token_ids, text, stream.finished


def run_all(target: str, on_chunk: Callable[[int], None]) -> dict[str, tuple[list[int], str, pb.Finished]]:
    """All requests at once."""
    answers: dict[str, tuple[list[int], str, pb.Finished]] = {}
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            with Client(target) as client:
                answers[name] = answer(client, name, on_chunk)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in REQUESTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not errors, errors
    assert answers.keys() == REQUESTS.keys(), "an answer has no end"
    return answers


class OpenStream:
    """A stream that lasts for minutes: where it runs, an engine has an open request whenever it is killed.

    All answers of `run_all` may have been computed when their clients, on a busy machine, see the twentieth token.
    """

    def __init__(self, target: str) -> None:
        self.token_ids: list[int] = []
        self._client = Client(target)
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.wait_for(1)

    def _read(self) -> None:
        request = {**REQUESTS["sampled"], "max_tokens": NUM_POSITIONS - 100}
        stream = self._client.stream("Once upon a time", return_token_ids=True, timeout_s=2 * HANG_S, **request)
        with contextlib.suppress(GenerationError):  # `close`; after any other error `wait_for` fails
            for chunk in stream:
                if chunk.first_token_index != len(self.token_ids):
                    break
                with self._came:
                    self.token_ids += chunk.token_ids
                    self._came.notify_all()

    def wait_for(self, num_tokens: int) -> None:
        """Waits until the stream has that many tokens."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.token_ids) >= num_tokens, HANG_S), len(self.token_ids)

    def close(self) -> None:
        """Ends the generation."""
        self._client.close()
        self._reader.join()


class Engines:
    """Two engines on sockets of their own and one frontend before both."""

    def __init__(self, folder: Path, processes: Processes, port: int, flags_of_first: tuple[str, ...] = ()) -> None:
        """Starts them; the first one with flags of its own."""
        self.processes = processes
        self.target = f"127.0.0.1:{port}"
        self.model = with_long_context(folder / "model", NUM_POSITIONS)
        self._sockets = [folder / f"{index}.sock" for index in range(2)]
        self._flags = (flags_of_first, ())
        self.running = [self._start(index) for index in range(2)]
        flags = [flag for socket in self._sockets for flag in ("--engine", f"unix:{socket}")]
        self.frontend = processes.start("frontend", *flags, "--port", str(port), "--no-http")

    def _start(self, index: int) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] = self.processes.start(
            *("engine", "--model", str(self.model), "--uds", str(self._sockets[index]), "--threads", "1"),
            *self._flags[index],
        )
        return process

    def log(self) -> str:
        """What the frontend says."""
        return str(self.processes.log(self.frontend))

    def wait_attached(self, num_times: int) -> None:
        """Waits until engines have been attached this many times in total."""
        deadline = time.monotonic() + HANG_S
        while self.log().count("is serving") < num_times:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)  # another process's log

    def kill_and_restart(self, index: int) -> None:
        """kill -9."""
        self.running[index].kill()
        self.running[index].wait()
        self.running[index] = self._start(index)


@pytest.fixture(name="engines")
def start_engines(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Engines]:
    processes = Processes(tmp_path)
    yield Engines(tmp_path, processes, free_port())
    processes.stop()


@pytest.mark.slow
def test_kill_9_in_the_middle_of_answers_changes_no_token(engines: Engines) -> None:
    engines.wait_attached(2)
    undisturbed = run_all(engines.target, lambda num_tokens: None)
    open_streams = [OpenStream(engines.target) for _ in engines.running]  # one in each engine; both in any that is left
    rng = random.Random(3)
    num_attached = 2
    for turn in range(3):
        kill_at, killed = rng.randrange(5, 120), threading.Event()
        lock = threading.Lock()

        def kill(num_tokens: int, turn: int = turn, kill_at: int = kill_at, killed: Any = killed) -> None:
            with lock:  # noqa: B023 - used within this turn
                if num_tokens >= kill_at and not killed.is_set():
                    killed.set()
                    engines.kill_and_restart(turn % 2)

        answers = run_all(engines.target, kill)
        assert killed.is_set()
        for name, (token_ids, text, finished) in answers.items():
            assert token_ids == undisturbed[name][0], f"{name}, killed at {kill_at}"
            assert text == undisturbed[name][1]
            assert finished.reason == undisturbed[name][2].reason
        num_attached += 1
        engines.wait_attached(num_attached)
    assert engines.log().count(" moved to another engine, ") == 3
    for stream in open_streams:
        stream.wait_for(max(len(stream.token_ids) + 1, 400))
        stream.close()
        assert stream.token_ids[:400] == undisturbed["sampled"][0]


@pytest.mark.slow
def test_kill_9_of_one_machine_of_an_engine_changes_no_token(tmp_path: Path, free_port: Callable[[], int]) -> None:
    flags = ("-pp", "2", "--nnodes", "2", "--master-addr", f"127.0.0.1:{free_port()}")
    processes = Processes(tmp_path)
    try:
        engines = Engines(tmp_path, processes, free_port(), flags_of_first=flags)
        second = processes.start("engine", "--model", str(engines.model), "--threads", "1", *flags, "--node-rank", "1")
        engines.wait_attached(2)
        undisturbed = run_all(engines.target, lambda num_tokens: None)
        open_streams = [OpenStream(engines.target) for _ in engines.running]  # one in each engine

        def kill(num_tokens: int) -> None:
            if num_tokens >= 50:
                second.kill()

        answers = run_all(engines.target, kill)
        assert (second.wait(HANG_S), engines.running[0].wait(HANG_S)) == (-signal.SIGKILL, 1)
        for name, (token_ids, text, _) in answers.items():
            assert token_ids == undisturbed[name][0], name
            assert text == undisturbed[name][1]
        assert engines.log().count(" moved to another engine, ") == 1
        for stream in open_streams:
            stream.wait_for(max(len(stream.token_ids) + 1, 400))
            stream.close()
            assert stream.token_ids[:400] == undisturbed["sampled"][0]
    finally:
        processes.stop()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.slow
def test_alone_the_engine_is_restarted_and_the_stream_goes_on(tmp_path: Path, free_port: Callable[[], int]) -> None:
    processes, port = Processes(tmp_path), free_port()
    model = with_long_context(tmp_path / "model", NUM_POSITIONS)
    ports = ("--port", str(port), "--http-port", "0")
    process = processes.start("frontend.cli.main", "up", *ports, "--model", str(model), "--threads", "1")
    target = f"127.0.0.1:{port}"
    deadline = time.monotonic() + HANG_S
    while f"serving on {target}" not in processes.log(process):
        assert time.monotonic() < deadline, processes.log(process)
        time.sleep(0.05)  # another process's log
    killed, lock = threading.Event(), threading.Lock()

    def kill(num_tokens: int) -> None:
        with lock:
            if num_tokens >= 20 and not killed.is_set():
                killed.set()
                (engine,) = engine_pids(process.pid)
                os.kill(engine, signal.SIGKILL)

    try:
        undisturbed = run_all(target, lambda num_tokens: None)
        open_stream = OpenStream(target)
        answers = run_all(target, kill)
        open_stream.wait_for(max(len(open_stream.token_ids) + 1, 400))
        open_stream.close()
        assert open_stream.token_ids[:400] == undisturbed["sampled"][0]
        assert killed.is_set()
        for name, (token_ids, text, _) in answers.items():
            assert (token_ids, text) == undisturbed[name][:2], name
        moved = [name for name, (_, _, finished) in answers.items() if finished.timing.moved.ToMicroseconds()]
        (num_lost,) = re.findall(r"lost (\d+) open request", processes.log(process))
        assert int(num_lost) == 1 + len(moved)  # others may have been computed before a client had 20 tokens
        with Client(target) as client:
            try:
                assert client.generate("Once upon a time", max_tokens=4).finished.usage.num_output_tokens > 0
            except GenerationError as error:
                pytest.fail(f"{error}; {processes.log(process)}")
    finally:
        processes.stop()
