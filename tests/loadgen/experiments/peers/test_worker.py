import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from loadgen.experiments.peers.worker import Worker, WorkerSystem
from loadgen.processes import cpu_s

WORKLOAD = Workload(((7, 8, 9), (100,)), (5, 2))


@pytest.fixture
def worker(worker_script: Path, tmp_path: Path) -> Iterator[Worker]:
    with Worker([sys.executable, "-I", worker_script], tmp_path / "openvino.log") as worker:
        yield worker


def load(worker: Worker, name: str, model: str = "m", **options: dict[str, object]) -> WorkerSystem:
    worker.call("load", name=name, model=model, **{"properties": {}, "scheduler": {}, **options})
    return WorkerSystem(worker, name=name)


def test_answers_every_request_with_times(worker: Worker) -> None:
    pipeline = load(worker, "p")
    for _ in range(2):  # it stays loaded
        run = pipeline.generate(WORKLOAD)
        assert run.output_ids == ((10, 11, 12, 13, 14), (101, 102))
        for times_s in run.token_times_s:
            assert list(times_s) == sorted(times_s)
            assert 0 < times_s[0] <= times_s[-1] <= run.wall_s
        first, second, third, *_ = run.token_times_s[0]
        assert first == second < third  # two tokens came with one step
        assert run.num_output_tokens == 7


def test_library_gets_every_option(worker: Worker, tmp_path: Path) -> None:
    load(worker, "p", "folder", properties={"INFERENCE_NUM_THREADS": 2}, scheduler={"cache_size": 3})
    noise, options = (tmp_path / "openvino.log").read_text().splitlines()
    assert noise == "noise"  # not among the answers
    assert json.loads(options) == ["folder", "CPU", {"cache_size": 3}, {"INFERENCE_NUM_THREADS": 2}]


def test_failure_is_reported_and_the_worker_goes_on(worker: Worker) -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)worker openvino failed at 'load':.*cannot read broken"):
        load(worker, "p", "broken")
    with pytest.raises(BenchmarkError, match=r"call is 'sing', it must be 'load' or 'generate'"):
        worker.call("sing")
    assert load(worker, "p").generate(WORKLOAD).num_output_tokens == 7


def test_systems_of_one_worker_share_its_process(worker: Worker) -> None:
    assert load(worker, "a").pids == load(worker, "b").pids == {worker.pid}
    assert cpu_s(worker.pid) > 0


def test_worker_that_cannot_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with Worker([sys.executable, "-c", "import a_missing_library"], tmp_path / "log") as worker:
        worker._popen.wait()
        with pytest.raises(BenchmarkError, match=r"(?s)ended during 'load'.*a_missing_library"):
            load(worker, "p")


def test_worker_that_is_killed_is_reported_with_the_signal(worker: Worker) -> None:
    worker._popen.send_signal(signal.SIGSEGV)
    with pytest.raises(BenchmarkError, match=r"ended during 'load' by Segmentation fault:"):
        load(worker, "p")
