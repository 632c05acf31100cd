import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from loadgen.experiments.peers.openvino.process import OpenVinoProcess
from loadgen.experiments.processes import cpu_s

WORKLOAD = Workload(((7, 8, 9), (100,)), (5, 2))


@pytest.fixture
def process(worker_script: Path, tmp_path: Path) -> Iterator[OpenVinoProcess]:
    with OpenVinoProcess(Path(sys.executable), tmp_path / "log", script=worker_script) as process:
        yield process


def test_answers_every_request_with_times(process: OpenVinoProcess) -> None:
    pipeline = process.load("p", Path("m"), properties={}, scheduler={})
    for _ in range(2):  # it stays loaded
        run = pipeline.generate(WORKLOAD)
        assert run.output_ids == ((10, 11, 12, 13, 14), (101, 102))
        for times_s in run.token_times_s:
            assert list(times_s) == sorted(times_s)
            assert 0 < times_s[0] <= times_s[-1] <= run.wall_s
        first, second, third, *_ = run.token_times_s[0]
        assert first == second < third  # two tokens came with one step
        assert run.num_output_tokens == 7


def test_load_says_everything_to_the_library(process: OpenVinoProcess, tmp_path: Path) -> None:
    process.load("p", Path("folder"), properties={"INFERENCE_NUM_THREADS": 2}, scheduler={"cache_size": 3})
    (noise, said) = (tmp_path / "log").read_text().splitlines()
    assert noise == "noise"  # not among the answers
    assert json.loads(said) == ["folder", "CPU", {"cache_size": 3}, {"INFERENCE_NUM_THREADS": 2}]


def test_failure_is_told_and_the_worker_goes_on(process: OpenVinoProcess) -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)failed at 'load':.*cannot read broken"):
        process.load("p", Path("broken"), properties={}, scheduler={})
    with pytest.raises(BenchmarkError, match=r"call is 'sing', it must be 'load' or 'generate'"):
        process.call(call="sing")
    assert process.load("p", Path("m"), properties={}, scheduler={}).generate(WORKLOAD).num_output_tokens == 7


def test_pipelines_share_a_process(process: OpenVinoProcess) -> None:
    a = process.load("a", Path("m"), properties={}, scheduler={})
    b = process.load("b", Path("m"), properties={}, scheduler={})
    assert a.pids == b.pids == {process.pid}
    assert cpu_s(process.pid) > 0


def test_worker_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import a_library_that_is_not_there")
    with OpenVinoProcess(Path(sys.executable), tmp_path / "log", script=script) as process:
        process._popen.wait()
        with pytest.raises(BenchmarkError, match=r"(?s)ended during 'load'.*a_library_that_is_not_there"):
            process.load("p", Path("m"), properties={}, scheduler={})
