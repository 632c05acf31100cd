"""G4, G5, G6, G7: tokens per second of an 8B model on a GPU with every slot taken, continuous and static, bf16 and fp8.

Claim: with prompts and answers mixed as servers see them the engine stays near the sequential floor, above what
TensorRT-LLM publishes for its own in fp8; static batches on the same kernels do not.

Goal: 1000/1000 at 80 % of the floor in bf16 (G4) and at 17,800 tokens/s in fp8 with an fp8 cache (G5); in fp8 128/2048
at 26,300, 2048/128 at 3,550, 2048/2048 at 12,200 and 128/128 at 28,000 (G6); ShareGPT-like lengths at 74 % of the floor
in bf16 (G7). Goals in tokens/s are for Llama-3.1-8B on an H200.

Method: a case is PROMPT/OUTPUT, fixed lengths, or `sharegpt`, log-normal ones with its means, 202 and 179; with
`:static` after it, in static batches. The engine's own step loop in this process, dummy weights, greedy, random
prompts, no prefix cache. Continuous: the slots are filled with requests in progress, each at a random point of its
answer, so that the load is steady from the first step; when all have a token the window of at least 60 s starts, and
each finished request is replaced. Static: the window lasts from the end of a batch to the end of a later one. The
figure is the output tokens delivered in the window over its length. The floor is `engine.bench.floor`'s for the mean
number of running requests. Cases run in the given order, within the budget. The fraction of the floor that `sharegpt`
reaches is printed beside that of `202/179`, its means as fixed lengths, if that ran before.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.bench.benchmark import Outcome, Settings, positive
from chairlift.bench.report import Result
from engine.bench.floor import Length
from engine.bench.fresh_scheduler import schedule_anew
from engine.bench.gpu.driver import EngineDriver, RequestMaker
from engine.bench.gpu.expected import expected_mix
from engine.bench.gpu.lengths import SHAREGPT_LIKE, in_progress, mean_length, sample_lengths, scaled
from engine.bench.gpu.setting import DEFAULT_SHAPE, GpuSetting, add_gpu_arguments
from engine.bench.gpu.stage import run_stage
from engine.bench.gpu.window import Window, continuous_window, static_window
from engine.serving.parts import EngineParts

_SHAREGPT = "sharegpt"
_STATIC = ":static"
_CASES = {
    "bf16": ("1000/1000", "202/179", "sharegpt", "sharegpt:static", "2048/128", "128/2048", "2048/2048", "128/128"),
    "fp8": ("1000/1000", "128/2048", "2048/128", "2048/2048", "128/128", "202/179", "sharegpt"),
}
_FRACTION_GOALS = {("bf16", "1000/1000"): ("G4", 0.80), ("bf16", _SHAREGPT): ("G7", 0.74)}
_RATE_GOALS = {
    ("fp8", "1000/1000"): ("G5", 17_800.0),
    ("fp8", "128/2048"): ("G6", 26_300.0),
    ("fp8", "2048/128"): ("G6", 3_550.0),
    ("fp8", "2048/2048"): ("G6", 12_200.0),
    ("fp8", "128/128"): ("G6", 28_000.0),
}
_NUM_SLOTS = 512
_MAX_NUM_BATCHED_TOKENS = 8192
_WINDOW_S = 60.0
_OVERRUN = 1.6  # time to fill the slots, over its floor
_QUICK_CASES = ("3/3", "sharegpt", "sharegpt:static")
_QUICK_SCALE = 1 / 64
_QUICK_SLOTS = 2


class _Case(NamedTuple):
    """A case; its `lengths` are repeated cyclically."""

    name: str
    lengths: tuple[Length, ...]
    is_static: bool


def run(settings: Settings) -> Outcome:
    """Measures every case that fits into the budget."""
    return run_stage(settings, lambda setting: _measure(setting, settings))


def _measure(setting: GpuSetting, settings: Settings) -> None:
    options = settings.options
    names = options.cases or (_QUICK_CASES if settings.quick else _CASES[options.precision])
    num_slots = _QUICK_SLOTS if settings.quick else options.slots
    window_s = 0.2 if settings.quick else options.window
    cases = [_case(name, quick=settings.quick) for name in names]
    longest = max(sum(length) for case in cases for length in case.lengths)
    budget = 64 if settings.quick else _MAX_NUM_BATCHED_TOKENS
    setting.progress(f"starting the engine, {setting.label}, {num_slots} slots")
    parts = setting.start(
        setting.engine_config(
            max_num_seqs=num_slots,
            max_num_batched_tokens=max(budget, num_slots),
            max_model_len=longest + 1,
            cache_tokens=num_slots * (longest + 32) if settings.quick else None,
        )
    )
    figures: dict[str, Result] = {}
    for case in cases:
        filling_s = _OVERRUN * sum(
            setting.floor.prefill_s(length.prompt) for length in in_progress(case.lengths, num_slots)
        )
        if not setting.budget.allows(filling_s + window_s * (1.3 if case.is_static else 1.05) + 2):
            setting.journal.leave_out(f"{case.name}, {setting.label}")
            continue
        setting.progress(f"{case.name}, {setting.label}")
        window = _serve(parts, case, RequestMaker(setting.vocab_size), num_slots, window_s)
        setting.journal.keep({f"{case.name}, {setting.label}": window.as_json()})
        figures[case.name] = figure = _figure(setting, case, window, num_slots)
        if case.name == _SHAREGPT and (equal := figures.get(_equal_lengths(case))) is not None:
            figure = figure.beside(equal, "equal lengths")
        setting.journal.add(figure)


def _serve(parts: EngineParts, case: _Case, maker: RequestMaker, num_slots: int, window_s: float) -> Window:
    measure = static_window if case.is_static else continuous_window
    driver = EngineDriver(schedule_anew(parts, policy="static" if case.is_static else "fcfs"))
    return measure(driver, maker, case.lengths, num_slots, window_s)


def _figure(setting: GpuSetting, case: _Case, window: Window, num_slots: int) -> Result:
    batch = max(1, round(window.mean_running))
    floor = 1 / setting.floor.seconds_per_output_token(case.lengths, batch)
    overlapped = 1 / setting.floor.overlapped_seconds_per_output_token(case.lengths, batch)
    prompt, output = mean_length(case.lengths)
    notes = [
        f"{window.seconds:.0f} s, {window.num_finished:,} requests of {prompt:,.0f}/{output:,.0f} tokens",
        f"{window.mean_running:.0f} of {num_slots} slots taken on average",
        f"overlap floor {overlapped:,.0f}",
    ]
    expected = expected_mix(setting.floor, case.lengths, batch)
    if setting.is_expected and expected is not None and not case.is_static:
        notes.append(expected.note(floor, "tok/s", "at least"))
    key = setting.precision.name, case.name
    goal_id, goal = "", None
    if key in _FRACTION_GOALS:
        goal_id, fraction = _FRACTION_GOALS[key]
        goal = fraction * floor
    elif key in _RATE_GOALS and setting.shape == DEFAULT_SHAPE:
        goal_id, goal = _RATE_GOALS[key]
    kind = "static" if case.is_static else "continuous"
    return Result(
        goal_id,
        f"{case.name.removesuffix(_STATIC)}, {kind}, {setting.label}",
        window.tokens_per_s,
        "tok/s",
        goal=goal,
        floor=floor,
        note="; ".join(notes),
    )


def _equal_lengths(case: _Case) -> str:
    """Returns the name of the case in which every request has the mean lengths of this one."""
    prompt, output = mean_length(case.lengths)
    return f"{prompt:.0f}/{output:.0f}"


def _case(name: str, *, quick: bool = False) -> _Case:
    """Parses the name of a case. Raises: ValueError: it is not a name of a case."""
    workload = name.removesuffix(_STATIC)
    if workload == _SHAREGPT:
        lengths = sample_lengths(SHAREGPT_LIKE)
        if quick:
            lengths = scaled(lengths[:64], _QUICK_SCALE)
    else:
        prompt, slash, output = workload.partition("/")
        if not slash:
            raise ValueError(f"{name!r} is neither PROMPT/OUTPUT nor {_SHAREGPT}, with or without {_STATIC}")
        lengths = (Length(positive(prompt), positive(output)),)
    return _Case(name, lengths, name.endswith(_STATIC))


def _case_names(text: str) -> Sequence[str]:
    names = text.split(",")
    for name in names:
        try:
            _case(name)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_gpu_arguments(parser)
    parser.add_argument(
        "--cases",
        type=_case_names,
        metavar="NAME,..",
        help="cases, such as 1000/1000,sharegpt:static (default: depends on --precision)",
    )
    parser.add_argument("--slots", type=positive, default=_NUM_SLOTS, help="running requests (default: %(default)s)")
    parser.add_argument(
        "--window",
        type=float,
        default=_WINDOW_S,
        metavar="S",
        help="least length of a window in seconds (default: %(default)g)",
    )
