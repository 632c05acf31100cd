"""The IO thread, in separate processes: grpc.aio supports one event loop per process, and pytest's is the first."""

import subprocess
import sys
from pathlib import Path

from tests.hang import HANG_S
from tests.support.engine.process import run_fake_engine

_DEFECT = """
import logging
from engine.serving.io_thread import IoThread
from engine.serving.listener import Listener
from engine.serving.server import EngineService

class Broken(EngineService):
    async def send_heartbeats(self):
        raise RuntimeError("broken heartbeat")

logging.basicConfig()
failures = []
thread = IoThread(lambda: Listener(Broken(), "127.0.0.1:0"), on_failure=lambda: failures.append("told"))
thread.start()
thread.stop(0)
assert thread.has_failed
assert failures == ["told"]
thread.stop(0)
"""

_DEFECT_IN_A_CALL = """
import logging
from engine.serving.io_thread import IoThread
from engine.serving.listener import Listener
from engine.serving.server import EngineService

def broken():
    raise RuntimeError("broken call")

logging.basicConfig()
failures = []
thread = IoThread(lambda: Listener(EngineService(), "127.0.0.1:0"), on_failure=lambda: failures.append("told"))
thread.start()
thread.call(broken)
thread._thread.join(20)
assert thread.has_failed
assert failures == ["told"]
thread.stop(0)
"""

_DEFECT_AT_START = """
from engine.serving.listener import Listener

async def start(listener):
    raise RuntimeError("broken start")

Listener.start = start
build_parts = None
"""

_TAKEN = """
from engine.errors import ConfigError
from engine.serving.io_thread import IoThread
from engine.serving.listener import Listener
from engine.serving.server import EngineService

first = IoThread(lambda: Listener(EngineService(), "127.0.0.1:0"), on_failure=lambda: None)
first.start()
second = IoThread(lambda: Listener(EngineService(), first.address), on_failure=lambda: None)
try:
    second.start()
except ConfigError as error:
    print(error)
second.stop(0)
first.stop(0)
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'protos')!r}]\n{code}"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_a_defect_on_the_thread_is_logged_and_reported() -> None:
    result = _run(_DEFECT)
    assert result.returncode == 0, result.stderr
    assert "broken heartbeat" in result.stderr


def test_a_defect_in_a_call_ends_the_thread() -> None:
    result = _run(_DEFECT_IN_A_CALL)
    assert result.returncode == 0, result.stderr
    assert "broken call" in result.stderr


def test_a_defect_at_its_start_is_a_failure_of_the_engine(tmp_path: Path) -> None:
    """Its exit status is 1, so that a supervisor restarts it."""
    result = run_fake_engine(_DEFECT_AT_START, tmp_path)
    assert result.returncode == 1, result.stderr
    assert "broken start" in result.stderr
    assert "stopped while loading" not in result.stderr


def test_an_address_in_use_is_reported_at_start() -> None:
    result = _run(_TAKEN)
    assert result.returncode == 0, result.stderr
    assert "Address already in use; choose another --host or --port" in result.stdout
