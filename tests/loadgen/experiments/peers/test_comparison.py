import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from chairlift.bench.agreement import Agreement
from chairlift.bench.benchmark import BenchmarkError, Settings
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.config import parse_config
from loadgen.experiments.peers import comparison as peers
from loadgen.experiments.peers.comparison import STEP_TOKENS, TRANSFORMERS, engine_flags, judge_ids, workloads
from loadgen.experiments.peers.figures import CHAIRLIFT
from loadgen.experiments.peers.openvino.pipelines import OPENVINO, OPENVINO_CACHED
from loadgen.experiments.peers.worker import BenchWorker
from loadgen.experiments.systems import System


@contextlib.contextmanager
def stand_ins(precision: str, checkpoint: Path, step_tokens: int, settings: Settings) -> Iterator[dict[str, System]]:
    """`transformers` in the place of OpenVINO."""
    with BenchWorker(settings.scratch / "stand-in.log") as worker:
        worker.load_transformers(checkpoint, settings.threads)
        yield {OPENVINO: worker.streaming(), OPENVINO_CACHED: worker.streaming()}


@dataclasses.dataclass(frozen=True)
class Ones:
    """Answers with ones; the last token of its last answer may be wrong."""

    wrong: int = 1
    pids: frozenset[int] = frozenset()

    def generate(self, workload: Workload) -> Run:
        answers = [[1] * limit for limit in workload.max_tokens]
        answers[-1][-1] = self.wrong
        times_s = tuple((1.0,) * limit for limit in workload.max_tokens)
        return Run(tuple(map(tuple, answers)), times_s, (0.0,) * len(answers), (), 1.0)


def expect_ones(workload: Workload, answers: Sequence[Sequence[int]]) -> Agreement:
    num_same = sum(token == 1 for answer in answers for token in answer)
    return Agreement(sum(map(len, answers)), num_same, 0, 0.0)


@pytest.mark.slow
def test_quick_comparison_through_the_real_pair(tmp_path: Path) -> None:
    settings = Settings(
        rounds=1,
        quick=True,
        threads=1,
        scratch=tmp_path,
        floors=None,
        progress=lambda _: None,
        options=argparse.Namespace(shapes=["135M"], precisions=["fp32"]),
    )
    outcome = peers.run(settings, stand_ins)
    raw = outcome.raw["tiny fp32"]
    assert isinstance(raw, dict)
    assert set(raw) == {"ids", "mixed", "shared prefix", "alone"}
    assert set(raw["ids"]) == {CHAIRLIFT, OPENVINO, OPENVINO_CACHED}
    assert set(raw["mixed"]["seconds"]) == {CHAIRLIFT, OPENVINO}
    assert set(raw["shared prefix"]["seconds"]) == {CHAIRLIFT, OPENVINO, OPENVINO_CACHED}
    assert set(raw["alone"]["seconds"]) == {CHAIRLIFT, OPENVINO, TRANSFORMERS}
    assert all(result.figure > 0 for result in outcome.results if result.unit == "x")
    assert f"mixed: {CHAIRLIFT}" in outcome.text
    assert {name: len(times_s) for name, times_s in raw["mixed"]["cpu_s"].items()} == {CHAIRLIFT: 1, OPENVINO: 1}


def test_wrong_ids_are_an_error_in_fp32() -> None:
    workload, _, _ = workloads(512, quick=True)
    assert "32 of 32" in judge_ids({"right": Ones()}, workload, expect_ones, "fp32")["right"]
    with pytest.raises(BenchmarkError, match="wrong: 1 ids are wrong"):
        judge_ids({"wrong": Ones(2)}, workload, expect_ones, "fp32")
    assert "31 of 32" in judge_ids({CHAIRLIFT: Ones(2)}, workload, expect_ones, "int8")[CHAIRLIFT]


def test_int8_far_off_is_an_error_of_chairlift_only() -> None:
    def expect_other(workload: Workload, answers: Sequence[Sequence[int]]) -> Agreement:
        return Agreement(sum(map(len, answers)), 0, 0, 1.0)

    workload, _, _ = workloads(512, quick=True)
    judge_ids({"peer": Ones()}, workload, expect_other, "int8")
    with pytest.raises(BenchmarkError, match="int8 is far off"):
        judge_ids({CHAIRLIFT: Ones()}, workload, expect_other, "int8")


def test_workloads_are_those_of_the_comparison() -> None:
    mixed, shared, alone = workloads(32_000, quick=False)
    assert len(mixed.prompts) == 64
    assert set(mixed.max_tokens) == {16, 64, 256}
    assert [len(prompt) for prompt in shared.prompts] == [416] * 48
    assert len({prompt[:384] for prompt in shared.prompts}) == 1
    assert len({prompt[384:] for prompt in shared.prompts}) == 48
    assert shared.max_tokens == (32,) * 48
    assert ([len(prompt) for prompt in alone.prompts], alone.max_tokens) == ([32], (64,))


def test_engine_gets_its_precision() -> None:
    int8, fp32 = (parse_config(engine_flags(Path("m"), precision, 2, 64), {}) for precision in ("int8", "fp32"))
    assert (int8.quantization, int8.kv_cache_dtype, int8.threads) == ("int8", "int8", 2)
    assert int8.max_num_seqs == fp32.max_num_seqs == 64  # all at once, as OpenVINO runs them
    assert int8.max_num_batched_tokens == STEP_TOKENS
    assert (fp32.quantization, fp32.kv_cache_dtype, fp32.dtype) == (None, "auto", "float32")
