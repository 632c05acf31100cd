"""`chairlift up` with the real engine: one command, two processes, and none left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chairlift import Client, GenerationError
from tests.docs.pages import blocks
from tests.hang import HANG_S
from tests.support.pair import Processes, with_long_context
from tests.support.processes import engine_pids, is_alive

NUM_TOKENS = 6000
"""Length of an answer that is not computed before a signal that is sent after its first tokens has come."""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Polls the state of other processes."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)  # nothing to wait on


@pytest.fixture(name="up")
def start_up(
    tmp_path: Path, free_port: Callable[[], int]
) -> Iterator[tuple[subprocess.Popen[str], str, Callable[[], str]]]:
    processes = Processes(tmp_path)
    port = free_port()
    model = with_long_context(tmp_path / "model", 2 * NUM_TOKENS)
    ports = ("--port", str(port), "--http-port", "0")
    process = processes.start(
        "frontend.cli.main", "up", *ports, "--model", str(model), "--shutdown-timeout", str(HANG_S)
    )
    wait_for(
        lambda: f"serving on 127.0.0.1:{port}" in processes.log(process) or process.poll() is not None,
        processes.log(process),
    )
    assert process.poll() is None, processes.log(process)
    yield process, f"127.0.0.1:{port}", lambda: processes.log(process)
    processes.stop()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.slow
def test_engine_killed_is_restarted_and_sigterm_drains(
    up: tuple[subprocess.Popen[str], str, Callable[[], str]],
) -> None:
    process, target, log = up
    (first_engine,) = engine_pids(process.pid)
    with Client(target) as client:
        assert client.generate("Once upon a time", max_tokens=8).finished.usage.num_output_tokens > 0
        os.kill(first_engine, signal.SIGKILL)

        def serves_again() -> bool:
            try:
                client.generate("Once upon a time", max_tokens=8, timeout_s=5)
            except GenerationError:
                return False
            return engine_pids(process.pid) != [first_engine]

        wait_for(serves_again, log())
        (engine,) = engine_pids(process.pid)

        stream = client.stream("Once upon a time", max_tokens=NUM_TOKENS, ignore_end_token=True)
        num_tokens = next(stream).num_tokens
        process.send_signal(signal.SIGTERM)
        num_tokens += sum(chunk.num_tokens for chunk in stream)
        assert num_tokens == NUM_TOKENS
        assert stream.finished is not None
    assert process.wait(HANG_S) == 0
    assert log().rstrip().endswith("drained 1")
    assert not is_alive(engine)


@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill")
@pytest.mark.slow
def test_what_the_documentation_says_to_try_can_be_tried(
    up: tuple[subprocess.Popen[str], str, Callable[[], str]], tmp_path: Path
) -> None:
    process, target, log = up
    (block,) = (block for block in blocks(["docs/failover.md"]) if "pkill -9 -f" in block.text)
    text = block.text.replace("pkill -9", f"pkill -9 -P {process.pid}")  # this pair's engine only
    text = text.replace("--max-tokens 900", f"--max-tokens {NUM_TOKENS}").replace("/tmp/", f"{tmp_path}/")
    text = text.replace(".venv/bin/chairlift", f"{sys.executable} -m frontend.cli.main")
    done = subprocess.run(
        ["bash", "-ec", text],
        env={**os.environ, "CHAIRLIFT_TARGET": target},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "not a letter differs"), done.stderr + log()
    assert f"{NUM_TOKENS} output tokens" in done.stderr
    assert log().count("engine started, pid ") == 2, "no engine was killed"
    for words in ("lost the engine at ", "lost 1 open request(s): ", "1 waiting request(s) left the failover queue"):
        assert words in log()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.slow
def test_kill_9_leaves_no_engine(up: tuple[subprocess.Popen[str], str, Callable[[], str]]) -> None:
    process, _, log = up
    (engine,) = engine_pids(process.pid)
    process.kill()
    process.wait()
    wait_for(lambda: not is_alive(engine), log())
