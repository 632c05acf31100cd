"""The thread of the event loop, in a process of its own: grpc.aio serves one loop per process, and here pytest's has
been before.
"""

import subprocess
import sys
from pathlib import Path

_DEFECT = """
import logging
from engine.io_thread import IoThread
from engine.server import EngineService

class Broken(EngineService):
    async def pulse(self):
        raise RuntimeError("broken pulse")

logging.basicConfig()
failures = []
thread = IoThread(Broken(), "127.0.0.1:0", on_failure=lambda: failures.append("told"))
thread.start()
thread.stop(0)
assert thread.has_failed
assert failures == ["told"]
thread.stop(0)
"""

_DEFECT_IN_A_CALL = """
import logging
from engine.io_thread import IoThread
from engine.server import EngineService

def broken():
    raise RuntimeError("broken call")

logging.basicConfig()
failures = []
thread = IoThread(EngineService(), "127.0.0.1:0", on_failure=lambda: failures.append("told"))
thread.start()
thread.call(broken)
thread._thread.join(20)
assert thread.has_failed
assert failures == ["told"]
thread.stop(0)
"""

_TAKEN = """
from engine.errors import ConfigError
from engine.io_thread import IoThread
from engine.server import EngineService

first = IoThread(EngineService(), "127.0.0.1:0", on_failure=lambda: None)
first.start()
second = IoThread(EngineService(), first.address, on_failure=lambda: None)
try:
    second.start()
except ConfigError as error:
    print(error)
second.stop(0)
first.stop(0)
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'protos')!r}]\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_defect_on_the_thread_is_logged_and_told() -> None:
    result = _run(_DEFECT)
    assert result.returncode == 0, result.stderr
    assert "broken pulse" in result.stderr


def test_a_defect_in_a_call_is_not_survived_with_news_lost() -> None:
    result = _run(_DEFECT_IN_A_CALL)
    assert result.returncode == 0, result.stderr
    assert "broken call" in result.stderr


def test_an_address_that_is_taken_is_known_at_start() -> None:
    result = _run(_TAKEN)
    assert result.returncode == 0, result.stderr
    assert "Address already in use; choose another --host or --port" in result.stdout
