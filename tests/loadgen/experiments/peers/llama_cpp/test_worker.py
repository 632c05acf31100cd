import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from loadgen.experiments.peers.worker import Worker, WorkerSystem

PROMPTS = ((7, 8, 9), (100,), (3, 4), (3, 4, 5, 6))
WORKLOAD = Workload(PROMPTS, (5, 2, 1, 3))


@pytest.fixture
def worker(worker_script: Path, tmp_path: Path) -> Iterator[Worker]:
    with Worker([sys.executable, "-I", worker_script], tmp_path / "llama.log") as worker:
        yield worker


def load(worker: Worker, slots: int, *, model: str = "m", context: int = 64) -> WorkerSystem:
    name = f"{slots} slots"
    worker.call("load", name=name, model=model, slots=slots, context=context, threads=2, cache="F16")
    return WorkerSystem(worker, name=name)


def said(log: Path, what: str) -> list[Any]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
    return [rest for first, *rest in lines if first == what]


def batches(log: Path) -> list[dict[int, int]]:
    """Tokens of each slot in each step."""
    return [{int(slot): count for slot, count in counts.items()} for (counts,) in said(log, "batch")]


def expected(workload: Workload) -> tuple[tuple[int, ...], ...]:
    answers = []
    for prompt, limit in zip(workload.prompts, workload.max_tokens, strict=True):
        tokens = list(prompt)
        for _ in range(limit):
            tokens.append(sum(tokens) % 97)
        answers.append(tuple(tokens[len(prompt) :]))
    return tuple(answers)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_every_request_is_answered_with_times(slots: int, worker: Worker) -> None:
    server = load(worker, slots)
    for _ in range(2):  # what the slots have from the first time is no harm
        run = server.generate(WORKLOAD)
        assert run.output_ids == expected(WORKLOAD)
        for times_s in run.token_times_s:
            assert list(times_s) == sorted(set(times_s))
            assert 0 < times_s[0] <= times_s[-1] <= run.wall_s


def test_slots_decode_together_and_the_next_request_joins_when_one_is_free(worker: Worker, tmp_path: Path) -> None:
    load(worker, 2).generate(WORKLOAD)
    assert batches(tmp_path / "llama.log") == [
        {0: 3, 1: 1},
        {0: 1, 1: 1},
        {0: 1, 1: 2},  # the second request has ended
        {0: 1, 1: 2},  # so has the third: of the fourth, 3 and 4 are in the slot
        {0: 1, 1: 1},
        {1: 1},
    ]


def test_prompts_are_computed_in_chunks_beside_tokens_that_decode(worker: Worker, tmp_path: Path) -> None:
    long = tuple(1 + index % 90 for index in range(3000))
    workload = Workload((long, (5,), long[:2000]), (2, 4, 2))
    assert load(worker, 3, context=4096).generate(workload).output_ids == expected(workload)
    first, second, *_ = batches(tmp_path / "llama.log")
    assert first == {0: 2047, 1: 1}  # n_batch tokens, single ones first; the third waits
    assert second == {0: 953, 1: 1, 2: 1094}


def test_a_request_takes_the_slot_that_has_most_of_its_prompt(worker: Worker, tmp_path: Path) -> None:
    server = load(worker, 2)
    server.generate(Workload(((1, 2, 3), (7, 8, 9)), (1, 1)))
    answer = server.generate(Workload(((7, 8, 9, 10),), (1,)))
    assert answer.output_ids == ((34,),)
    server.generate(Workload(((7, 8, 9, 10),), (1,)))
    *_, joined, same = batches(tmp_path / "llama.log")
    assert joined == {1: 1}
    assert same == {1: 1}  # the last token of a prompt is computed again, for its logits


def test_library_gets_every_option_and_a_model_once(worker: Worker, tmp_path: Path) -> None:
    for slots in (16, 1):
        load(worker, slots, model="model.gguf", context=768)
    log = tmp_path / "llama.log"
    assert log.read_text().startswith("noise\n")  # not among the answers
    assert said(log, "model") == [["model.gguf"]]
    for (options,), slots in zip(said(log, "context"), (16, 1), strict=True):
        assert (options["n_ctx"], options["n_seq_max"]) == (768 * slots, slots)
        assert (options["n_batch"], options["n_ubatch"]) == (2048, 512)
        assert options["n_threads"] == options["n_threads_batch"] == 2
        assert options["type_k"] == options["type_v"] == 1
        assert options["kv_unified"] is False
    worker.call("quantize", source="a", out="b", type="Q4_K_M", threads=2)
    assert said(log, "quantize") == [["a", "b", 15, 2]]


def test_failures_are_reported_and_the_worker_goes_on(worker: Worker) -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)worker llama failed at 'load':.*llama.cpp cannot load broken"):
        load(worker, 1, model="broken")
    with pytest.raises(BenchmarkError, match="llama_model_quantize returned 1 for broken"):
        worker.call("quantize", source="broken", out="b", type="Q8_0", threads=1)
    with pytest.raises(BenchmarkError, match=r"llama_decode returned 1 for 3 tokens"):
        load(worker, 1, context=2).generate(WORKLOAD)
    with pytest.raises(BenchmarkError, match=r"call is 'sing', it must be 'quantize', 'load' or 'generate'"):
        worker.call("sing")
    assert load(worker, 8).generate(WORKLOAD).output_ids == expected(WORKLOAD)
