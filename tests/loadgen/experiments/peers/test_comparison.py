import argparse
import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from chairlift.bench.agreement import Agreement
from chairlift.bench.benchmark import BenchmarkError, Settings
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.config import parse_config
from loadgen.experiments.peers import comparison as peers
from loadgen.experiments.peers.comparison import (
    STEP_TOKENS,
    TRANSFORMERS,
    WORKLOADS,
    Peers,
    add_arguments,
    candidates,
    engine_flags,
    judge_ids,
    terms_of,
    workloads,
)
from loadgen.experiments.peers.figures import CHAIRLIFT, IN_PROCESS
from loadgen.experiments.peers.formats import FORMATS, NumberFormat, Terms
from loadgen.experiments.peers.llama_cpp.servers import LLAMA_CPP, LLAMA_CPP_ALONE
from loadgen.experiments.peers.openvino.pipelines import OPENVINO, OPENVINO_CACHED
from loadgen.experiments.peers.worker import BenchWorker
from loadgen.experiments.systems import System


@contextlib.contextmanager
def stand_ins(
    number_format: NumberFormat, model: Path, terms: Terms, settings: Settings
) -> Iterator[dict[str, System]]:
    """`transformers` in the place of OpenVINO."""
    with BenchWorker(settings.scratch / "stand-in.log") as worker:
        worker.load_transformers(model, settings.threads)
        yield {OPENVINO: worker.streaming(), OPENVINO_CACHED: worker.streaming()}


@contextlib.contextmanager
def llama_stand_ins(
    number_format: NumberFormat, model: Path, terms: Terms, settings: Settings
) -> Iterator[dict[str, System]]:
    """The engine, without the servers, in the place of llama.cpp: it reads the same file."""
    with BenchWorker(settings.scratch / "stand-in.log") as worker:
        system = worker.load_engine(["--model", str(model), "--threads", "1", "--max-model-len", "64"])
        yield {LLAMA_CPP: system, LLAMA_CPP_ALONE: system}


def copy(source: Path, out: Path, number_format: NumberFormat, settings: Settings) -> None:
    """Quantises nothing."""
    assert number_format.name in out.name
    shutil.copy(source, out)


STAND_INS = Peers(stand_ins, llama_stand_ins, copy)


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


def quick_settings(folder: Path, number_format: str) -> Settings:
    options = argparse.Namespace(shapes=["135M"], formats=[number_format], workloads=list(WORKLOADS), judged=64)
    return Settings(
        rounds=1, quick=True, threads=1, scratch=folder, floors=None, progress=lambda _: None, options=options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number_format", "peer", "others", "alone"),
    [
        ("fp32", OPENVINO, {OPENVINO_CACHED}, {OPENVINO, TRANSFORMERS}),
        ("Q8_0", LLAMA_CPP, {LLAMA_CPP_ALONE}, {LLAMA_CPP_ALONE}),
    ],
)
def test_quick_comparison_through_the_real_pair(
    number_format: str, peer: str, others: set[str], alone: set[str], tmp_path: Path
) -> None:
    outcome = peers.run(quick_settings(tmp_path, number_format), STAND_INS)
    raw = outcome.raw[f"tiny {number_format}"]
    assert isinstance(raw, dict)
    assert set(raw) == {"ids", *WORKLOADS}
    assert set(raw["ids"]) == {CHAIRLIFT, peer, *others}
    assert raw["ids"][CHAIRLIFT].startswith("32 of 32 ids are transformers'") or number_format != "fp32"
    assert set(raw["shared-prefix"]["seconds"]) == {CHAIRLIFT, peer, *others}
    assert set(raw["alone"]["seconds"]) == {CHAIRLIFT, IN_PROCESS, *alone}
    assert set(raw["decode"]["seconds"]) == {CHAIRLIFT, peer}
    assert all(result.figure > 0 for result in outcome.results if result.unit == "x")
    assert any("alone, in process" in result.what for result in outcome.results)
    assert f"mixed: {CHAIRLIFT}" in outcome.text
    assert set(raw["mixed"]["cpu_s"]) >= {CHAIRLIFT, peer}
    assert not list(tmp_path.glob("*-BF16.gguf"))  # what was quantised is not kept


def quick_mix() -> Workload:
    return workloads(512, max_rows=4, quick=True)["mixed"]


def test_wrong_ids_are_an_error_in_fp32() -> None:
    workload = quick_mix()
    assert "32 of 32" in judge_ids({"right": Ones()}, workload, expect_ones, is_exact=True)["right"]
    with pytest.raises(BenchmarkError, match="wrong: 1 ids are wrong"):
        judge_ids({"wrong": Ones(2)}, workload, expect_ones, is_exact=True)
    assert "31 of 32" in judge_ids({CHAIRLIFT: Ones(2)}, workload, expect_ones, is_exact=False)[CHAIRLIFT]


def test_int8_far_off_is_an_error_of_chairlift_only() -> None:
    def expect_other(workload: Workload, answers: Sequence[Sequence[int]]) -> Agreement:
        return Agreement(sum(map(len, answers)), 0, 0, 1.0)

    workload = quick_mix()
    judge_ids({"peer": Ones()}, workload, expect_other, is_exact=False)
    with pytest.raises(BenchmarkError, match="int8 is far off"):
        judge_ids({CHAIRLIFT: Ones()}, workload, expect_other, is_exact=False)


def test_workloads_are_those_of_the_comparison() -> None:
    found = workloads(32_000, max_rows=16, quick=False)
    assert tuple(found) == WORKLOADS
    mixed, shared, alone, decode = found.values()
    assert len(mixed.prompts) == 64
    assert set(mixed.max_tokens) == {16, 64, 256}
    assert [len(prompt) for prompt in shared.prompts] == [416] * 48
    assert len({prompt[:384] for prompt in shared.prompts}) == 1
    assert len({prompt[384:] for prompt in shared.prompts}) == 48
    assert shared.max_tokens == (32,) * 48
    assert ([len(prompt) for prompt in alone.prompts], alone.max_tokens) == ([32], (64,))
    assert ([len(prompt) for prompt in decode.prompts], decode.max_tokens) == ([96] * 16, (64,) * 16)
    assert len(set(decode.prompts)) == 16


def test_both_sides_get_equal_terms() -> None:
    chosen = workloads(32_000, max_rows=16, quick=False).values()
    longest = max(map(len, next(iter(chosen)).prompts)) + 256
    for name, num_slots in (("fp32", 64), ("Q4_K_M", 16)):  # OpenVINO runs all at once
        terms = terms_of(chosen, FORMATS[name])
        assert terms[:2] == (STEP_TOKENS, num_slots)
        assert 512 < terms.slot_tokens <= longest


@pytest.mark.parametrize(
    ("name", "quantization", "kv_cache_dtype", "dtype"),
    [
        ("fp32", None, "auto", "float32"),
        ("int8", "int8", "int8", "auto"),
        ("bf16", None, "auto", "bfloat16"),
        ("Q4_K_M", "int8", "bfloat16", "auto"),
        ("Q4_K_M-exact", None, "auto", "auto"),
    ],
)
def test_engine_gets_its_format(name: str, quantization: str | None, kv_cache_dtype: str, dtype: str) -> None:
    config = parse_config(engine_flags(Path("m"), FORMATS[name], 2, Terms(STEP_TOKENS, 64, 768)), {})
    assert (config.quantization, config.kv_cache_dtype, config.dtype) == (quantization, kv_cache_dtype, dtype)
    assert (config.threads, config.max_num_seqs, config.max_num_batched_tokens) == (2, 64, STEP_TOKENS)


def test_candidates_are_those_a_workload_is_for() -> None:
    openvino = (CHAIRLIFT, OPENVINO, OPENVINO_CACHED, IN_PROCESS, TRANSFORMERS)
    llama_cpp = (CHAIRLIFT, LLAMA_CPP, LLAMA_CPP_ALONE)
    assert candidates("mixed", openvino) == [CHAIRLIFT, OPENVINO]
    assert candidates("shared-prefix", openvino) == [CHAIRLIFT, OPENVINO, OPENVINO_CACHED]
    assert candidates("alone", openvino) == [CHAIRLIFT, OPENVINO, IN_PROCESS, TRANSFORMERS]
    assert candidates("decode", openvino) == [CHAIRLIFT, OPENVINO]
    assert candidates("mixed", llama_cpp) == [*llama_cpp]
    assert candidates("alone", llama_cpp) == [CHAIRLIFT, LLAMA_CPP_ALONE]
    assert candidates("decode", llama_cpp) == [CHAIRLIFT, LLAMA_CPP]


def test_flags_are_those_of_the_formats() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([])
    assert set(options.formats) <= set(FORMATS)
    assert (options.workloads, options.judged) == (list(WORKLOADS), 64)
    assert parser.parse_args(["--formats", "F16", "--workloads", "alone", "--judged", "2"]).formats == ["F16"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--formats", "fp8"])
