"""Flags of synthetic workloads: data set and schedule. Names are vLLM's where it has them."""

import argparse
from collections.abc import Callable
from math import inf

import numpy as np
from numpy.typing import NDArray

from chairlift.service.flag_kinds import choice as choice_of
from chairlift.service.flag_kinds import integer, notation, number
from chairlift.service.flags import Flag
from loadgen import arrivals
from loadgen.arrivals import Step
from loadgen.cli.flags import add_flags
from loadgen.cli.trace_options import FIT_FLAGS, SEED_FLAG, fitted
from loadgen.cli.values import ABOVE_ZERO, FILE, POSITIVE
from loadgen.errors import OptionError
from loadgen.synthetic import (
    MAX_REQUESTS,
    Lengths,
    choice,
    exponential,
    lognormal,
    random_requests,
    shared_prefix,
    uniform,
    with_arrivals,
)
from loadgen.trace.formats import MAX_TOKENS, ReadOptions
from loadgen.trace.reader import read_trace
from loadgen.trace.schema import Trace
from loadgen.trace.window import MAX_SPAN_S, limit

DATASETS = ("random", "shared-prefix", "jsonl")
_NUM_PROMPTS = 1000
_NOTATIONS = "N, LOW-HIGH, A,B,.. (any of them), lognormal:MEAN:SIGMA or exponential:MEAN"
_OWN_FLAGS = {
    "random": ("random_input_len", "random_output_len", "random_range_ratio"),
    "shared-prefix": tuple(
        f"prefix_repetition_{name}" for name in ("prefix_len", "suffix_len", "num_prefixes", "output_len")
    ),
    "jsonl": ("dataset_path",),
}
SYNTHETIC_FLAGS = (
    *(flag for flags in _OWN_FLAGS.values() for flag in flags),
    "num_prompts", "request_rate", "burstiness", "on_off", "rate_steps",
    "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps",
)  # fmt: skip
"""Attributes of the flags that a trace has no use for."""


def _lengths(text: str) -> Lengths:
    kind, *values = text.split(":")
    try:
        if kind == "lognormal" and len(values) == 2:
            return lognormal(float(values[0]), float(values[1]))
        if kind == "exponential" and len(values) == 1:
            return exponential(float(values[0]))
        low, dash, high = text.partition("-")
        if dash:
            return uniform(int(low), int(high))
        return choice(*(int(part) for part in text.split(",")))
    except OptionError as error:
        raise ValueError(str(error)) from error


def _rate(text: str) -> float:
    return inf if text == "inf" else POSITIVE.value_of(text)


def _on_off(text: str) -> tuple[float, float]:
    on, _, off = text.partition(":")
    return ABOVE_ZERO.value_of(on), ABOVE_ZERO.value_of(off)


def _steps(text: str) -> tuple[Step, ...]:
    steps = []
    for part in text.split(","):
        rate, _, duration = part.partition(":")
        steps.append(Step(POSITIVE.value_of(rate), ABOVE_ZERO.value_of(duration)))
    return tuple(steps)


_LENGTHS = notation(
    _lengths, f"{_NOTATIONS}, 1 to {MAX_TOKENS} tokens each, LOW not above HIGH, SIGMA above 0 and at most 5", "LEN"
)
_RATE = notation(_rate, "a number above 0, or inf")
_ON_OFF = notation(_on_off, "two durations above 0, ON:OFF such as 5s:20s", "ON:OFF")
_STEPS = notation(_steps, "rates and durations above 0, RATE:TIME,... such as 2:1m,4:1m", "R:TIME,..")


def add_dataset_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the flags of a data set to a parser or a group."""
    flags = (
        Flag("--dataset", "kind of workload (default: random)", choice_of(DATASETS)),
        Flag("--num-prompts", f"number of requests (default: {_NUM_PROMPTS}; jsonl: all)", integer(1, MAX_REQUESTS)),
        Flag("--dataset-path", "jsonl: file with lengths and shared blocks of requests", FILE),
        Flag("--random-input-len", f"prompt tokens: {_NOTATIONS} (default: 1024)", _LENGTHS),
        Flag("--random-output-len", "output tokens, in the same notation (default: 128)", _LENGTHS),
        Flag(
            "--random-range-ratio", "vary lengths by factors from 1 - R to 1 + R (default: 0)", number(0, below=1), "R"
        ),
        Flag(
            "--prefix-repetition-num-prefixes",
            "shared-prefix: number of different prefixes (default: 10)",
            integer(1),
        ),
        Flag("--prefix-repetition-prefix-len", "shared-prefix: tokens of each prefix (default: 256)", integer(1)),
        Flag("--prefix-repetition-suffix-len", "shared-prefix: tokens after the prefix (default: 256)", _LENGTHS),
        Flag("--prefix-repetition-output-len", "shared-prefix: output tokens (default: 128)", _LENGTHS),
        *FIT_FLAGS,
        SEED_FLAG,
    )
    add_flags(group, flags)


def add_schedule_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the flags of a schedule to a parser or a group."""
    flags = (
        Flag("--request-rate", "requests/s on average (default: inf, all at once)", _RATE, "R|inf"),
        Flag("--burstiness", "shape of intervals: 1 is Poisson (default), less is burstier, inf is even", _RATE, "B"),
        Flag("--on-off", "alternate bursts and pauses of these mean durations, such as 5s:20s", _ON_OFF),
        Flag("--rate-steps", "sequence of rates and durations, such as 2:1m,4:1m", _STEPS),
        Flag("--ramp-up-strategy", "change the rate over the run", choice_of(("linear", "exponential"))),
        Flag("--ramp-up-start-rps", "requests/s at the start", POSITIVE, "R"),
        Flag("--ramp-up-end-rps", "requests/s at the end", POSITIVE, "R"),
    )
    add_flags(group, flags)


def asked_rate(options: argparse.Namespace) -> float | None:
    """The mean rate that a schedule is drawn for; None where none is drawn or it has no single one."""
    rate: float | None = getattr(options, "request_rate", None)
    drawn = rate is not None and rate != inf and options.burstiness != inf
    return rate if drawn else None


def synthetic_workload(options: argparse.Namespace) -> Trace:
    """Returns the workload that the flags describe.

    Raises:
        OptionError: flags contradict each other, or a number is out of range.
        TraceError: the file of a jsonl data set cannot be read.
    """
    dataset = options.dataset or "random"
    for other, flags in _OWN_FLAGS.items():
        given = [flag for flag in flags if getattr(options, flag) is not None]
        if given and other != dataset:
            raise OptionError(f"{_flag(given[0])} is for --dataset {other}, this is --dataset {dataset}")
    make = {"random": _random, "shared-prefix": _shared_prefix, "jsonl": _jsonl}[dataset]
    requests = fitted(make(options), options)
    try:
        arrival_s = _schedule(options)(len(requests))
    except ValueError as error:
        raise OptionError(str(error)) from error
    if not arrival_s[-1] < MAX_SPAN_S:
        raise OptionError(f"the schedule lasts {arrival_s[-1]:g} s, more than {MAX_SPAN_S:g} s; raise the rate")
    return with_arrivals(requests, arrival_s)


def _random(options: argparse.Namespace) -> Trace:
    input_len = options.random_input_len or choice(1024)
    output_len = options.random_output_len or choice(128)
    if options.random_range_ratio is not None:
        input_len = _around("--random-input-len", input_len, options.random_range_ratio)
        output_len = _around("--random-output-len", output_len, options.random_range_ratio)
    return random_requests(options.num_prompts or _NUM_PROMPTS, input_len, output_len, seed=options.seed)


def _shared_prefix(options: argparse.Namespace) -> Trace:
    return shared_prefix(
        options.num_prompts or _NUM_PROMPTS,
        num_prefixes=options.prefix_repetition_num_prefixes or 10,
        prefix_len=options.prefix_repetition_prefix_len or 256,
        own_len=options.prefix_repetition_suffix_len or choice(256),
        output_len=options.prefix_repetition_output_len or choice(128),
        seed=options.seed,
    )


def _jsonl(options: argparse.Namespace) -> Trace:
    if options.dataset_path is None:
        raise OptionError("--dataset jsonl needs --dataset-path")
    trace = read_trace(options.dataset_path, options=ReadOptions(timed=False, sort=True, seed=options.seed))
    if options.num_prompts is None:
        return trace
    if options.num_prompts > len(trace):
        raise OptionError(f"--num-prompts {options.num_prompts}: {options.dataset_path} has {len(trace)} requests")
    return limit(trace, options.num_prompts)


def _schedule(options: argparse.Namespace) -> Callable[[int], NDArray[np.float64]]:
    """The schedule for a number of requests."""
    _refuse_contradictions(options)
    rate: float = inf if options.request_rate is None else options.request_rate
    burstiness: float = 1.0 if options.burstiness is None else options.burstiness
    seed: int = options.seed
    if options.on_off is not None:
        on_s, off_s = options.on_off
        return lambda count: arrivals.on_off(rate, count, on_s=on_s, off_s=off_s, seed=seed)
    if options.rate_steps is not None:
        return lambda count: arrivals.stepped(options.rate_steps, count, burstiness=burstiness, seed=seed)
    if options.ramp_up_strategy is not None:
        ramp = {"linear": arrivals.linear_ramp, "exponential": arrivals.exponential_ramp}[options.ramp_up_strategy]
        start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
        return lambda count: ramp(start, end, count, burstiness=burstiness, seed=seed)
    if rate == inf:
        return arrivals.at_once
    if burstiness == inf:
        return lambda count: arrivals.constant(rate, count)
    return lambda count: arrivals.gamma(rate, count, burstiness=burstiness, seed=seed)


def _refuse_contradictions(options: argparse.Namespace) -> None:
    rate = options.request_rate
    concurrency = getattr(options, "concurrency", None)  # a flag of `run`
    for name in ("request_rate", "on_off", "rate_steps", "ramp_up_strategy"):
        if concurrency is not None and getattr(options, name) is not None:
            raise OptionError(f"--concurrency {concurrency} is a closed loop, {_flag(name)} makes an open one")
    shaped = [name for name in ("rate_steps", "ramp_up_strategy") if getattr(options, name) is not None]
    for name in shaped:
        for other in ("request_rate", "on_off", *shaped):
            if other != name and getattr(options, other) is not None:
                raise OptionError(f"{_flag(name)} and {_flag(other)} both set the rate; give one of them")
    for name in ("ramp_up_start_rps", "ramp_up_end_rps"):
        value = getattr(options, name)
        if options.ramp_up_strategy is None and value is not None:
            raise OptionError(f"{_flag(name)} needs --ramp-up-strategy")
        if options.ramp_up_strategy is not None and value is None:
            raise OptionError(f"--ramp-up-strategy {options.ramp_up_strategy} needs {_flag(name)}")
    unpaced = not shaped and rate in (None, inf)
    if options.on_off is not None and unpaced:
        raise OptionError("--on-off needs --request-rate, the mean over bursts and silences")
    if options.burstiness is not None:
        if options.on_off is not None:
            raise OptionError("--burstiness and --on-off both shape the bursts; give one of them")
        if unpaced:
            raise OptionError("--burstiness needs --request-rate: at rate inf all requests come at once")
        if options.burstiness == inf and shaped:
            raise OptionError(f"--burstiness inf and {_flag(shaped[0])}: even gaps are only for --request-rate")


def _around(flag: str, lengths: Lengths, ratio: float) -> Lengths:
    if lengths.kind != "choice" or len(lengths.values) != 1:
        raise OptionError(f"--random-range-ratio and {flag}: only a single length can have a range around it")
    middle = lengths.values[0]
    return uniform(max(1, int(middle * (1 - ratio))), int(middle * (1 + ratio)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
