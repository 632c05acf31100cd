"""The real pair, shared by all modules of a worker, or a module's own."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from chairlift import Tls
from loadgen.processes import held_port
from tests.support.pair import PairAddress, Processes, running_pair, wait_until_served


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairAddress]:
    """The demo model, served to all modules: a test leaves it running and idle."""
    with running_pair(tmp_path_factory.mktemp("pair")) as running:
        yield running


@pytest.fixture(scope="module")
def start_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., PairAddress]]:
    """start_pair(*engine_flags, frontend_flags=()) -> PairAddress of this module's own."""
    with contextlib.ExitStack() as started:
        yield lambda *engine_flags, frontend_flags=(): started.enter_context(
            running_pair(tmp_path_factory.mktemp("pair"), *engine_flags, frontend_flags=frontend_flags)
        )


@pytest.fixture(scope="module")
def free_port() -> Iterator[Callable[[], int]]:
    """free_port() -> a port of 127.0.0.1 that no other process gets before the module ends."""
    with contextlib.ExitStack() as held:
        yield lambda: held.enter_context(held_port())


@pytest.fixture(scope="module")
def start_frontend(
    pair: PairAddress, tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Callable[..., str]]:
    """start_frontend(*flags, api_key=..., tls=...) -> address of another frontend of the demo model's engine."""
    processes = Processes(tmp_path_factory.mktemp("frontends"))

    def start(*flags: str, api_key: str | None = None, tls: Tls | None = None) -> str:
        target = f"127.0.0.1:{free_port()}"
        port = target.rpartition(":")[2]
        processes.start("frontend", "--engine", pair.engine_target, "--port", port, "--no-http", *flags)
        wait_until_served(target, processes, api_key=api_key, tls=tls)
        return target

    yield start
    processes.stop()
