import urllib.request
from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.running import mock_in_processes, mock_server
from loadgen.run.controller import run_workload
from loadgen.target.base import TargetSpec
from tests.hang import HANG_S
from tests.support.loadgen.mock import mock_in_thread
from tests.support.loadgen.runs import Answered, run_of

QUICK = MockBehaviour(ttft_s=0.0, itl_s=0.0)
WORKLOAD = run_of([Answered(0.01 * index, output_tokens=8) for index in range(20)]).workload


@pytest.mark.parametrize("api", ["grpc", "openai"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_servers_in_processes_answer_on_one_port(api: Any, num_processes: int) -> None:
    with mock_in_processes(api, QUICK, num_processes) as url:
        run = run_workload(WORKLOAD, TargetSpec(url, "grpc" if api == "grpc" else "completions"))
    assert (run.requests["num_tokens"] == 8).all()


def test_a_server_in_a_thread_is_gone_when_the_block_is_left() -> None:
    with mock_in_thread("openai", QUICK) as server:
        health = server.url.removesuffix("/v1") + "/health"
        assert urllib.request.urlopen(health, timeout=HANG_S).status == 200
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(health, timeout=HANG_S)


async def test_a_port_that_is_taken_is_an_error() -> None:
    first = mock_server("openai", QUICK)
    await first.start()
    port = int(first.url.rpartition(":")[2].removesuffix("/v1"))
    for api in ("openai", "grpc"):
        with pytest.raises(OSError, match=str(port)):
            await mock_server(api, QUICK, port=port).start()  # type: ignore[arg-type]
    await first.close()


def test_a_process_that_cannot_start_is_reported() -> None:
    behaviour = MockBehaviour()
    object.__setattr__(behaviour, "ttft_s", _Unloadable())
    with pytest.raises(LoadgenError, match="a mock server did not start"), mock_in_processes("grpc", behaviour):
        pass


class _Unloadable:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _fail, ()


def _fail() -> None:
    raise SystemExit(3)
