"""C5, C6: effect of a long prompt on decoding requests, and of chunks on the prompt.

Claim: a prompt computed in chunks beside decoding rows stalls them for about one chunk, not for the whole prompt
(Sarathi-Serve, OSDI'24), and its own TTFT grows little.

Goal: C5: the worst time between two tokens (TBT) at least 13x lower with chunks of 64 than unchunked. C6: the prompt's
TTFT at most 2.1x (chunks of 64) and 1.3x (chunks of 256) of what it is unchunked with the decodes paused.

Method: once 8 requests decode, a prompt of 2,048 tokens arrives, always after the same step. Chunks of c are a budget
of c + 8 tokens per step, because the scheduler serves decoding rows first. "Unchunked" takes prompt and decodes in one
step; "alone" is the prompt on an idle engine in one step, as if the decodes were paused. TBT counts all inter-token
latencies of the 8 that end after the prompt's arrival. All variants share one loaded model and must give the same
tokens. The floors count tokens, as if every token of a step cost the same.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.rounds import Rounds, alternate_runs
from engine.bench.serve import engine

_UNCHUNKED, _ALONE = "unchunked", "alone"
_PROMPT_OUTPUT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Scene:
    """Sizes: `num_streams` requests of `stream_prompt_len` tokens decode when `prompt_len` tokens arrive."""

    prompt_len: int
    num_streams: int
    stream_prompt_len: int
    chunks: tuple[int, int]

    @property
    def arrival_step(self) -> int:
        """Step after which the prompt arrives: the streams' prompts are computed by then with any budget."""
        budget = self.chunks[0] + self.num_streams
        return -(-self.num_streams * self.stream_prompt_len // budget) + 6

    @property
    def stream_tokens(self) -> int:
        """Output tokens of each stream: enough to decode until the prompt in the smallest chunks is answered."""
        return self.arrival_step + -(-self.prompt_len // self.chunks[0]) + _PROMPT_OUTPUT_TOKENS + 2

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return max(self.prompt_len + _PROMPT_OUTPUT_TOKENS, self.stream_prompt_len + self.stream_tokens)

    def workload(self, vocab_size: int) -> Workload:
        """Returns the streams and, last, the prompt."""
        rng = np.random.default_rng(0)
        lengths = [self.stream_prompt_len] * self.num_streams + [self.prompt_len]
        prompts = tuple(tuple(rng.integers(1, vocab_size, length).tolist()) for length in lengths)
        return Workload(prompts, (self.stream_tokens,) * self.num_streams + (_PROMPT_OUTPUT_TOKENS,))

    def worst_gap_s(self, run: Run) -> float:
        """Returns the longest inter-token latency of any stream after the prompt's arrival."""
        return max(max(self._gaps_s(run, index)) for index in range(self.num_streams))

    def median_gap_s(self, run: Run) -> float:
        """Returns the median inter-token latency of the streams after the prompt's arrival."""
        return statistics.median(gap for index in range(self.num_streams) for gap in self._gaps_s(run, index))

    def _gaps_s(self, run: Run, index: int) -> list[float]:
        arrival_s, times_s = run.arrivals_s[-1], run.token_times_s[index]
        return [gap for gap, end_s in zip(run.gaps_s(index), times_s[1:], strict=True) if end_s > arrival_s]


_SCENE = Scene(prompt_len=2048, num_streams=8, stream_prompt_len=32, chunks=(64, 256))
_QUICK_SCENE = Scene(prompt_len=64, num_streams=3, stream_prompt_len=8, chunks=(16, 32))


def run(settings: Settings) -> Outcome:
    """Serves the scene under every budget, alternating."""
    scene = _QUICK_SCENE if settings.quick else _SCENE
    parts = engine(
        engine_config(
            settings,
            max_num_seqs=scene.num_streams + 1,
            max_num_batched_tokens=scene.prompt_len + scene.num_streams,
            max_model_len=scene.max_model_len,
        )
    )
    workload = scene.workload(chosen_shape(settings).vocab_size)
    prompt_alone = Workload(workload.prompts[-1:], workload.max_tokens[-1:])
    arrivals = (0,) * scene.num_streams + (scene.arrival_step,)

    def with_budget(budget: int) -> Callable[[], Run]:
        return lambda: serve_anew(parts, workload, max_num_batched_tokens=budget, after_steps=arrivals)

    variants: dict[str, Callable[[], Run]] = {
        _chunk(chunk): with_budget(chunk + scene.num_streams) for chunk in scene.chunks
    }
    variants[_UNCHUNKED] = with_budget(scene.prompt_len + scene.num_streams)
    variants[_ALONE] = lambda: serve_anew(parts, prompt_alone)
    rounds = alternate_runs(variants, settings)
    reference = rounds.runs[_UNCHUNKED][0].output_ids
    for chunk in scene.chunks:
        require_equal_ids(f"{_chunk(chunk)} and unchunked", rounds.runs[_chunk(chunk)][0].output_ids, reference)
    require_equal_ids("alone and unchunked", rounds.runs[_ALONE][0].output_ids, reference[-1:])
    return _outcome(scene, rounds, describe(settings))


def _outcome(scene: Scene, rounds: Rounds, description: str) -> Outcome:
    budgets = [name for name in rounds.runs if name != _ALONE]
    worst_gap_s = rounds.samples(scene.worst_gap_s, budgets)
    median_gap_s = rounds.samples(scene.median_gap_s, budgets)
    ttft_s = rounds.samples(lambda run: run.ttft_s(len(run.output_ids) - 1))
    fine, coarse = map(_chunk, scene.chunks)
    stall = worst_gap_s.ratio(_UNCHUNKED, fine)
    results = [
        Result(
            "C5",
            f"worst TBT, unchunked over {fine}",
            stall.best,
            "x",
            goal=13.0,
            floor=(scene.prompt_len + scene.num_streams) / (scene.chunks[0] + scene.num_streams),
            note=f"{stall.low:.2f}..{stall.high:.2f}; {1e3 * worst_gap_s.best(_UNCHUNKED):.1f} ms against "
            f"{1e3 * worst_gap_s.best(fine):.1f} ms, median TBT {1e3 * median_gap_s.best(fine):.1f} ms; {description}",
        )
    ]
    for name, chunk, goal in ((fine, scene.chunks[0], 2.1), (coarse, scene.chunks[1], 1.3)):
        wait = ttft_s.ratio(name, _ALONE)
        results.append(
            Result(
                "C6",
                f"TTFT of the prompt, {name} over alone",
                wait.best,
                "x",
                goal=goal,
                direction="at most",
                floor=1 + scene.num_streams / chunk,
                note=f"{wait.low:.2f}..{wait.high:.2f}; {ttft_s.best(name):.2f} s against {ttft_s.best(_ALONE):.2f} s",
            )
        )
    raw = {
        "worst_gap_s": worst_gap_s.raw,
        "median_gap_s": median_gap_s.raw,
        "ttft_s": ttft_s.raw,
        "steps": rounds.raw_steps(),
    }
    return Outcome(tuple(results), raw)


def _chunk(num_tokens: int) -> str:
    return f"chunk {num_tokens}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, quantization="int8")
