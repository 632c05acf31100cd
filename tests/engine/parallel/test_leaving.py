"""Every rank destroys its recorded steps before it leaves the group: graphs hold nodes of the communicator."""

import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import engine.startup.follower
import engine.startup.rank
import engine.startup.rank_group
from engine.config import EngineConfig
from engine.parallel.group import ParallelGroup
from engine.parallel.layout import RankLayout
from engine.parallel.process_group import ProcessGroup
from engine.startup.progress import StartupProgress
from engine.startup.rank import RankParts
from engine.startup.rank_group import Assignment, build_runner
from tests.hang import HANG_S

CONFIG = EngineConfig(tensor_parallel_size=2, rank_timeout_s=HANG_S)
TASK = SimpleNamespace(config=CONFIG)
CPU = torch.device("cpu")


class Runner:
    """Fake runner of one rank, whose only call is `close`."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def close(self) -> None:
        self._calls.append("close runner")


class Followers:
    """Fake of `engine.parallel.followers.Followers` without processes."""

    meeting_folder = Path("unused")

    def __init__(self, ranks: Sequence[int], *, leave: Callable[[], None], **_: object) -> None:
        self._leave = leave

    def assign(self, assignments: list[Assignment]) -> None:
        pass

    def waiting_for(self, what: str, at_least_s: float) -> "Followers":
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_ready(self) -> None:
        pass

    def close(self) -> None:
        self._leave()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of the calls that end a rank."""
    calls: list[str] = []

    def build_rank(task: object, group: ParallelGroup, device: torch.device, startup: object) -> RankParts:
        return RankParts(Runner(calls), None)  # type: ignore[arg-type]

    for module in (engine.startup.rank, engine.startup.rank_group):  # that of followers, and that of rank 0
        monkeypatch.setattr(module, "build_rank", build_rank)
    monkeypatch.setattr(engine.startup.rank_group, "Followers", Followers)
    monkeypatch.setattr(engine.startup.follower, "log_to_stderr", lambda *_, **__: None)  # this process is the tests'
    monkeypatch.setattr(ProcessGroup, "join", lambda *_: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy group"))
    return calls


def test_rank_0_closes_its_runner_before_it_leaves(calls: list[str]) -> None:
    group = ProcessGroup(0, RankLayout(2), CPU)
    parts = build_runner(TASK, group, CPU, StartupProgress(), lambda error: pytest.fail(str(error)))  # type: ignore[arg-type]
    parts.runner.close()
    assert calls == ["close runner", "destroy group"]


def test_a_follower_closes_its_runner_before_it_leaves(calls: list[str]) -> None:
    ours, theirs = Pipe()
    theirs.send(Assignment(1, CPU, Path("unused"), TASK))  # type: ignore[arg-type]
    with socket.socket(fileno=os.dup(theirs.fileno())) as end:
        end.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        engine.startup.follower._follow(ours)
    assert calls == ["close runner", "destroy group"]
