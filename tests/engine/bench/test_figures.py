"""Figures computed from runs: which inter-token latencies and which steps count."""

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.run import Run, Step
from engine.bench.chunked_prefill import Scene
from engine.bench.decode import median_decode_s
from engine.bench.piggyback import seconds_of_chunks
from engine.bench.quality import common_prefix, up_to_end
from engine.bench.solo import step_parts


def step(ended_s: float, seconds: float, num_rows: int, num_tokens: int) -> Step:
    return Step(ended_s, seconds, seconds, num_rows, num_tokens, num_rows)


def run_of(
    steps: list[Step], arrivals_s: tuple[float, ...], token_times_s: tuple[tuple[float, ...], ...] | None = None
) -> Run:
    times = token_times_s or ((0.0,),) * len(arrivals_s)
    return Run(tuple((1,) * len(t) for t in times), times, arrivals_s, tuple(steps), wall_s=1.0)


def test_stall_counts_latencies_that_end_after_the_prompts_arrival() -> None:
    scene = Scene(prompt_len=64, num_streams=2, stream_prompt_len=8, chunks=(16, 32))
    streams = ((0.0, 5.0, 6.0, 8.0), (0.0, 4.0, 5.0, 8.0))  # latencies of 5 and 4 s end before it
    run = run_of([], (0.0, 0.0, 5.5), (*streams, (9.0,)))
    assert scene.worst_gap_s(run) == 3.0
    assert scene.median_gap_s(run) == 2.0


def test_streams_decode_longer_than_the_prompt_takes() -> None:
    scene = Scene(prompt_len=2048, num_streams=8, stream_prompt_len=32, chunks=(64, 256))
    assert scene.arrival_step >= 8 * 32 / 72
    assert scene.stream_tokens >= scene.arrival_step + 2048 / 64
    assert scene.max_model_len >= 2048


def test_chunks_are_the_four_steps_after_the_arrival() -> None:
    steps = [step(1.0, 9.0, 2, 20), *(step(2.0 + i, 0.5, 3, 18) for i in range(4)), step(7.0, 9.0, 3, 3)]
    run = run_of(steps, (0.0, 0.0, 1.0))
    assert seconds_of_chunks(run, 16) == 2.0
    with pytest.raises(BenchmarkError, match="3 rows and 18 tokens, not 2 decodes and a chunk of 15"):
        seconds_of_chunks(run, 15)


def test_a_decode_step_is_one_in_which_all_decode() -> None:
    steps = [step(0.0, 9.0, 2, 20), step(0.0, 8.0, 1, 1), *(step(0.0, float(i), 2, 2) for i in range(1, 22))]
    run = run_of(steps, (0.0, 0.0))
    assert median_decode_s(run) == 11.0
    with pytest.raises(BenchmarkError, match="19 steps had 2 decodes, at least 20 are required"):
        median_decode_s(run_of(steps[:-2], (0.0, 0.0)))


def test_answers_agree_up_to_their_first_difference_or_end() -> None:
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix((1, 2), (1, 2, 3)) == 2
    assert up_to_end((5, 6, 1, 7, 1), {1}) == (5, 6, 1)
    assert up_to_end((5, 6), {1}) == (5, 6)


def test_step_parts_exclude_the_prompts_step() -> None:
    steps = [Step(0.0, 99.0, 99.0, 1, 32, 1), Step(0.0, 10.0, 9.0, 1, 1, 1), Step(0.0, 20.0, 18.0, 1, 1, 1)]
    parts = step_parts(run_of(steps, (0.0,)), (99.0, 8.0, 16.0))
    assert parts == pytest.approx((12.0, 1.5, 1.5))
    assert parts.share_outside == pytest.approx(0.2)
