import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError, Settings
from chairlift.bench.workload import Workload
from engine.bench.agreement import load_reference
from engine.bench.machine import measure_floors
from engine.bench.serve import Run
from engine.bench.shapes import SHAPES, save_checkpoint
from engine.bench.transformers_solo import TransformersSolo
from loadgen.experiments.contest import Contender
from loadgen.experiments.peers import comparison as peers
from loadgen.experiments.peers.comparison import TRANSFORMERS, engine_config, judge_ids, workloads
from loadgen.experiments.peers.figures import CHAIRLIFT
from loadgen.experiments.peers.openvino.contenders import OPENVINO, OPENVINO_CACHED


@contextlib.contextmanager
def stand_ins(precision: str, checkpoint: Path, settings: Settings) -> Iterator[dict[str, Contender]]:
    """`transformers` in the place of OpenVINO."""
    solo = TransformersSolo(load_reference(checkpoint))
    yield {OPENVINO: solo, OPENVINO_CACHED: solo}


@dataclasses.dataclass(frozen=True)
class Liar:
    """Gets the last token of its last answer wrong."""

    honest: Contender
    vocab_size: int
    pids: frozenset[int] = frozenset()

    def generate(self, workload: Workload) -> Run:
        run = self.honest.generate(workload)
        *ids, last = run.output_ids[-1]
        wrong = (*ids, (last + 1) % self.vocab_size)
        return dataclasses.replace(run, output_ids=(*run.output_ids[:-1], wrong))


def test_quick_comparison_through_the_real_pair(tmp_path: Path) -> None:
    settings = Settings(
        rounds=1,
        quick=True,
        threads=1,
        scratch=tmp_path,
        floors=measure_floors(1, quick=True),
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


def test_wrong_ids_are_an_error_in_fp32(tmp_path: Path) -> None:
    reference = load_reference(save_checkpoint("tiny", tmp_path))
    vocab_size = SHAPES["tiny"].vocab_size
    workload, _, _ = workloads(vocab_size, quick=True)
    honest = TransformersSolo(reference)
    liar = Liar(honest, vocab_size)
    assert "32 of 32" in judge_ids({"honest": honest}, workload, reference, "fp32")["honest"]
    with pytest.raises(BenchmarkError, match="liar: 1 ids are wrong"):
        judge_ids({"liar": liar}, workload, reference, "fp32")
    assert "31 of 32" in judge_ids({CHAIRLIFT: liar}, workload, reference, "int8")[CHAIRLIFT]


def test_int8_far_off_is_an_error_of_ours_only(tmp_path: Path) -> None:
    reference = load_reference(save_checkpoint("tiny", tmp_path))
    vocab_size = SHAPES["tiny"].vocab_size
    workload, _, _ = workloads(vocab_size, quick=True)
    other_model = TransformersSolo(load_reference(save_checkpoint("tiny", tmp_path / "other", seed=1)))
    judge_ids({"peer": other_model}, workload, reference, "int8")
    with pytest.raises(BenchmarkError, match="int8 is far off"):
        judge_ids({CHAIRLIFT: other_model}, workload, reference, "int8")


def test_workloads_are_those_of_the_comparison() -> None:
    mixed, shared, alone = workloads(32_000, quick=False)
    assert len(mixed.prompts) == 64
    assert set(mixed.max_tokens) == {16, 64, 256}
    assert [len(prompt) for prompt in shared.prompts] == [416] * 48
    assert len({prompt[:384] for prompt in shared.prompts}) == 1
    assert len({prompt[384:] for prompt in shared.prompts}) == 48
    assert shared.max_tokens == (32,) * 48
    assert ([len(prompt) for prompt in alone.prompts], alone.max_tokens) == ([32], (64,))


def test_precision_is_asked_for() -> None:
    int8, fp32 = (engine_config(Path("m"), precision, 2, 64) for precision in ("int8", "fp32"))
    assert (int8.quantization, int8.kv_cache_dtype, int8.threads) == ("int8", "int8", 2)
    assert int8.max_num_seqs == fp32.max_num_seqs == 64  # all at once, as OpenVINO runs them
    assert (fp32.quantization, fp32.kv_cache_dtype, fp32.dtype) == (None, "auto", "float32")
