"""G1, G2, G3, G13, G14: steps of an 8B model on a GPU as fractions of their floor, and the GPU's idle time.

Claim: a decode step takes little more time than one read of the weights and of the batch's KV cache, with one request
and with 256; a prefill step little more than its matrix products; the GPU does not wait for the host between steps.

Goal: decode within 86 % of the floor at batch 1 (G1), 85 % at batch 64 and 82 % at 256 (G2); prompts of 2,048 tokens in
steps of 8,192 within 85 % (G3); at most 1 % idle time between the decode steps of 32 requests (G13); the sampler
with top-k and top-p at most 3 % of the step of 256 (G14).

Method: dummy weights, normally distributed, made on the device; the engine's own step loop in this process, two steps
in flight, greedy. A batch of requests computes its prompts, settles, and then 48 steps are timed from one delivery to
the next; the figure is the median. The floor is `engine.bench.floor`'s, with the copy bandwidth and the matrix rates
that the device reached in the same run, for the mean context in the middle of the timed steps. The largest batch runs
again with one request of 32,000 tokens, beside the fraction of the floor that equal lengths reach. Idle time is what
PyTorch's profiler finds between kernels: the N - 1 largest gaps of N steps. The sampler is timed alone, in a graph.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from chairlift.bench.benchmark import Outcome, Settings, positive
from chairlift.bench.report import Result
from engine.bench.fresh_scheduler import schedule_anew
from engine.bench.gpu.decode_steps import DecodePoint, DecodeSteps, Decoding, prefill_seconds
from engine.bench.gpu.driver import EngineDriver, RequestMaker
from engine.bench.gpu.expected import IDLE, SAMPLER, ExpectedRange
from engine.bench.gpu.setting import GpuSetting, add_gpu_arguments
from engine.bench.gpu.stage import run_stage
from engine.serving.parts import EngineParts
from kernels.bench.expected import DECODE_STEPS, PREFILL_STEPS

_GOALS = {1: ("G1", 0.86), 64: ("G2", 0.85), 256: ("G2", 0.82)}
_PREFILL_GOAL = 0.85
_SHOWN_KERNELS, _SHOWN_NAME = 12, 90
_IDLE_GOAL, _IDLE_BATCH = 0.01, 32
_SAMPLER_GOAL = 0.03


class _Sizes(NamedTuple):
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    num_steps: int
    max_num_batched_tokens: int
    prefill_len: int
    num_prefills: int
    num_settling: int = 8
    longest: int = 32_000


_SIZES = _Sizes((1, 8, 32, 64, 128, 256), (512, 2048), 48, 8192, 2048, 48)
_QUICK = _Sizes((2,), (12,), 2, 32, 12, 4, num_settling=2, longest=20)


def run(settings: Settings) -> Outcome:
    """Measures every point that fits into the budget."""
    return run_stage(settings, lambda setting: _measure(setting, _sizes(settings)))


def _sizes(settings: Settings) -> _Sizes:
    if settings.quick:
        return _QUICK
    options = settings.options
    return _SIZES._replace(batches=tuple(sorted(options.batches)), contexts=tuple(sorted(options.contexts)))


def _measure(setting: GpuSetting, sizes: _Sizes) -> None:
    longest = max(*sizes.contexts, sizes.prefill_len)
    points = [DecodePoint(b, c, sizes.num_steps, sizes.num_settling) for c in sizes.contexts for b in sizes.batches]
    uneven = [replace(p, longest=sizes.longest) for p in points if p.batch == max(sizes.batches) > 1][:1]
    needs = [list(map(sum, point.lengths(sizes.max_num_batched_tokens))) for point in (*points, *uneven)]
    setting.progress(f"starting the engine, {setting.label}")
    parts = setting.start(
        setting.engine_config(
            max_num_seqs=max(sizes.batches),
            max_num_batched_tokens=max(sizes.max_num_batched_tokens, *sizes.batches),
            max_model_len=max(longest + 1, *map(max, needs)),
            cache_tokens=max(
                sizes.num_prefills * (sizes.prefill_len + 32),
                *(sum(need) + 32 * len(need) for need in needs),
            ),
        )
    )
    bench = _Bench(setting, sizes, parts)
    bench.prefill()
    step_s = {(point.batch, point.context): bench.decode(point) for point in points}
    for point in uneven:
        bench.decode(point)
    bench.idle(DecodePoint(min(_IDLE_BATCH, max(sizes.batches)), max(sizes.contexts), sizes.num_steps))
    bench.sampler(max(sizes.batches), step_s.get((max(sizes.batches), min(sizes.contexts))))


class _Bench:
    """Measurements on one engine, in sequence."""

    def __init__(self, setting: GpuSetting, sizes: _Sizes, parts: EngineParts) -> None:
        self._setting = setting
        self._sizes = sizes
        self._parts = parts
        self._maker = RequestMaker(setting.vocab_size)

    def prefill(self) -> None:
        """G3: measures prompts in full steps."""
        sizes, setting = self._sizes, self._setting
        what = f"prefill, {sizes.prefill_len:,}-token prompts in steps of {sizes.max_num_batched_tokens:,}"
        floor_s = setting.floor.prefill_s(sizes.prefill_len)
        if not self._allows(what, 4 * sizes.num_prefills * floor_s):
            return
        for _ in range(2):  # the first run warms up libraries for these sizes
            seconds = prefill_seconds(self._driver(), self._maker, sizes.prefill_len, sizes.num_prefills)
        floor = sizes.prefill_len / floor_s
        is_known = setting.is_expected and setting.precision.name == "bf16"
        setting.journal.add(
            Result(
                "G3",
                f"{what}, {setting.label}",
                sizes.prefill_len / seconds,
                "tok/s",
                goal=_PREFILL_GOAL * floor,
                floor=floor,
                note=PREFILL_STEPS[_SIZES.prefill_len].note(floor, "tok/s", "at least") if is_known else "",
            )
        )

    def decode(self, point: DecodePoint) -> float | None:
        """G1, G2: measures and returns the median step; None if it was left out."""
        setting = self._setting
        what = point.label
        seconds = 2 * sum(map(setting.floor.prefill_s, point.contexts))
        if not self._allows(
            what,
            seconds + 3 * point.num_steps * setting.floor.decode_step_s(point.batch, sum(point.contexts) / point.batch),
        ):
            return None
        with Decoding(self._driver(), self._maker, point, self._sizes.max_num_batched_tokens) as decoding:
            timed = decoding.steps(point.num_steps)
        setting.journal.keep({what: {"step_s": timed.step_s, "mean_context": timed.mean_context}})
        figure = self._decode_figure(f"{what}, {setting.label}", point, timed)
        equal = f"{replace(point, longest=None).label}, {setting.label}"
        for other in setting.journal.results:
            if other.what == equal:
                figure = figure.beside(other, "equal lengths")
        setting.journal.add(figure)
        return statistics.median(timed.step_s)

    def idle(self, point: DecodePoint) -> None:
        """G13: measures the idle time of the GPU between steps."""
        what = f"GPU idle between decode steps, batch {point.batch}, context {point.context:,}"
        if not self._setting.device.is_gpu:
            self._setting.progress(f"{what}: only a GPU can be profiled")
            return
        seconds = 2 * point.batch * self._setting.floor.prefill_s(point.context)
        if not self._allows(what, seconds + 10):
            return
        from engine.bench.gpu.idle import idle_shares, kernel_times
        from engine.bench.gpu.profile import device_intervals

        with Decoding(self._driver(), self._maker, point, self._sizes.max_num_batched_tokens) as decoding:
            intervals = device_intervals(lambda: decoding.steps(point.num_steps))
        idle = idle_shares(intervals, point.num_steps + 2)  # one step was in flight, one is launched ahead
        sums = kernel_times(intervals)
        for name, time_us in list(sums.items())[:_SHOWN_KERNELS]:
            self._setting.progress(f"  {time_us / point.num_steps:8,.0f} us a step: {name[:_SHOWN_NAME]}")
        self._setting.journal.keep(
            {what: {"span_us": idle.span_us, "between": idle.between_steps, "all": idle.total, "kernels_us": sums}}
        )
        self._setting.journal.add(
            Result(
                "G13",
                f"{what}, {self._setting.label}",
                100 * idle.between_steps,
                "%",
                direction="at most",
                goal=100 * _IDLE_GOAL,
                note=f"{100 * idle.total:.1f} % with the gaps between the kernels of a step; under the profiler, "
                f"{idle.span_us / point.num_steps / 1e3:.2f} ms a step{self._expected(IDLE)}",
            )
        )

    def sampler(self, batch: int, step_s: float | None) -> None:
        """G14: measures the sampler's share of the step of this batch at the shorter context."""
        setting = self._setting
        what = f"sampler with top-k 50, top-p 0.9, share of the decode step, batch {batch}"
        if not setting.device.is_gpu:
            setting.progress(f"{what}: kernels.bench rehearses it")
            return
        if step_s is None or not self._allows(what, 10):
            return
        from kernels.bench.sampling import KINDS, sampler_case
        from kernels.bench.timing import time_calls

        kind = next(kind for kind in KINDS if kind.top_k and kind.top_p < 1)
        prepared = sampler_case(setting.device, setting.vocab_size, batch, kind).prepare()
        seconds = time_calls(prepared.calls, setting.device.device).median_s
        setting.journal.add(
            Result(
                "G14",
                f"{what}, context {min(self._sizes.contexts):,}, {setting.label}",
                100 * seconds / step_s,
                "%",
                direction="at most",
                goal=100 * _SAMPLER_GOAL,
                note=f"{1e6 * seconds:,.0f} us of {1e3 * step_s:.2f} ms, a greedy step{self._expected(SAMPLER)}",
            )
        )

    def _decode_figure(self, what: str, point: DecodePoint, timed: DecodeSteps) -> Result:
        floor_s = self._setting.floor.decode_step_s(point.batch, timed.mean_context)
        goal_id, goal = _GOALS.get(point.batch, ("", None)) if point.longest is None else ("", None)
        is_judged = goal is not None and self._setting.precision.name == "bf16"
        ordered = sorted(timed.step_s)
        median_s = statistics.median(ordered)
        note = (
            f"{1e3 * ordered[0]:.3g} to {1e3 * ordered[-1]:.3g} ms, {point.batch / median_s:,.0f} tok/s, "
            f"mean context {timed.mean_context:,.0f}"
        )
        expected = DECODE_STEPS.get((self._setting.precision.name, point.batch))
        if expected is not None and self._setting.is_expected:
            note += f"; {expected.note(1e3 * floor_s, 'ms', 'at most')}"
        return Result(
            goal_id if is_judged else "",
            what,
            1e3 * median_s,
            "ms",
            direction="at most",
            goal=1e3 * floor_s / goal if goal is not None and is_judged else None,
            floor=1e3 * floor_s,
            note=note,
        )

    def _expected(self, figure: ExpectedRange) -> str:
        return f"; {figure.note}" if self._setting.is_expected and self._setting.precision.name == "bf16" else ""

    def _driver(self) -> EngineDriver:
        return EngineDriver(schedule_anew(self._parts))

    def _allows(self, what: str, seconds: float) -> bool:
        if self._setting.budget.allows(seconds):
            self._setting.progress(what)
            return True
        self._setting.journal.leave_out(f"{what}, {self._setting.label}")
        return False


def _positives(text: str) -> Sequence[int]:
    return [positive(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_gpu_arguments(parser)
    parser.add_argument(
        "--batches", type=_positives, default=_SIZES.batches, metavar="N,..", help="batch sizes (default: all six)"
    )
    parser.add_argument(
        "--contexts",
        type=_positives,
        default=_SIZES.contexts,
        metavar="N,..",
        help="context lengths in tokens (default: 512,2048)",
    )
