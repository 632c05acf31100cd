"""The workloads: their lengths, what their prompts share, and a trace's window on this machine's scale."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadgen.errors import OptionError
from loadgen.experiments.batching.cases import (
    QUICK,
    Sizes,
    paced_case,
    prompts_of,
    queued_case,
    sweep_case,
    synthetic_cases,
    trace_window,
)
from tests.support.loadgen.runs import workload_of

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_the_cases_are_those_of_the_experiment() -> None:
    uniform, mixture, skewed = synthetic_cases(Sizes())
    assert set(uniform.trace.output_tokens.tolist()) == {128}
    assert Counter(mixture.trace.output_tokens.tolist()) == {64: 64, 256: 64, 1024: 64}
    batches = skewed.trace.output_tokens.reshape(20, 64)
    assert all(Counter(batch) == {16: 63, 1024: 1} for batch in batches.tolist())
    places = batches.argmax(axis=1)
    assert places.min() >= 16
    assert places.max() < 48
    assert len(set(places.tolist())) > 5
    assert all(case.is_queued and not case.trace.arrival_s.any() for case in (uniform, mixture, skewed))


def test_lengths_are_in_no_order() -> None:
    outputs = synthetic_cases(Sizes())[1].trace.output_tokens
    assert len({tuple(Counter(batch).items()) for batch in outputs.reshape(-1, 64).tolist()}) > 1
    assert outputs.tolist() != sorted(outputs.tolist())
    assert outputs.tolist() == synthetic_cases(Sizes())[1].trace.output_tokens.tolist()


def test_prompts_begin_with_one_block_and_go_on_each_in_its_own_way() -> None:
    trace = synthetic_cases(QUICK)[0].trace
    assert trace.blocks is not None
    assert set(trace.input_tokens.tolist()) == {32}
    rows = [trace.blocks.of(index).tolist() for index in range(len(trace))]
    assert {row[0] for row in rows} == {0}
    assert all(len(row) * trace.blocks.block_tokens == 32 for row in rows)
    own = [block for row in rows for block in row[1:]]
    assert len(own) == len(set(own))
    assert 0 not in own


def test_cases_have_prompts_of_their_own() -> None:
    assert len({case.trace.digest for case in [*synthetic_cases(QUICK), sweep_case(QUICK, 4)]}) == 4


@pytest.mark.parametrize(("num_slots", "count"), [(4, 64), (16, 64), (64, 256), (128, 512)])
def test_the_sweep_has_four_batches_for_large_engines(num_slots: int, count: int) -> None:
    outputs = sweep_case(Sizes(), num_slots).trace.output_tokens
    assert len(outputs) == count
    assert set(outputs.tolist()) == {8, 32, 128}


def test_answers_are_cut_to_the_models_context() -> None:
    sizes = Sizes().within(1024)
    assert (sizes.long, sizes.mixture, sizes.uniform, sizes.short) == (992, (64, 256, 992), 128, 16)
    assert Sizes().within(4096) == Sizes()
    with pytest.raises(OptionError, match="context of 60 tokens"):
        Sizes().within(60)


def trace_file(folder: Path) -> Path:
    rows = [
        f"2023-11-16 18:00:{second:02}.0000000,{tokens},8\n" for second, tokens in enumerate([40, 80, 800, 120, 160])
    ]
    path = folder / "azure.csv"
    path.write_text(HEADER + "".join(rows))
    return path


def test_a_window_of_a_trace_is_scaled_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    trace, title = trace_window(trace_file(tmp_path), window_s=(1.0, 5.0), most=3, scale=0.5, max_model_len=100)
    assert trace.input_tokens.tolist() == [40, 60]
    assert trace.output_tokens.tolist() == [4, 4]
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert title == ("2 requests of azure.csv from second 1 on, lengths times 0.5, 1 longer than 100 tokens left out")
    queued = queued_case(trace, title)
    assert queued.is_queued
    assert queued.trace.arrival_s.tolist() == [0.0, 0.0]
    paced = paced_case(trace, title, 4.0)
    assert not paced.is_queued
    assert paced.trace.arrival_s == pytest.approx([0.0, 0.5])
    assert paced.title.endswith("its arrivals at 4 per second")


def test_a_window_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="1 requests are left of its seconds 4 to 9"):
        trace_window(trace_file(tmp_path), window_s=(4.0, 9.0), most=3, scale=0.5, max_model_len=100)


def test_prompts_are_the_same_in_every_call_and_share_what_the_trace_says() -> None:
    trace = synthetic_cases(QUICK)[2].trace
    prompts = prompts_of(trace, 1000)
    assert prompts == prompts_of(trace, 1000)
    assert {len(prompt) for prompt in prompts} == {32}
    assert 0 < min(map(min, prompts)) <= max(map(max, prompts)) < 1000
    assert len({prompt[:16] for prompt in prompts}) == 1
    assert len({prompt[16:] for prompt in prompts}) == len(prompts)
    unshared = prompts_of(workload_of(np.zeros(3), np.array([5, 6, 7]), np.array([1, 1, 1])), 1000)
    assert [len(prompt) for prompt in unshared] == [5, 6, 7]
    assert len({prompt[:5] for prompt in unshared}) == 3
