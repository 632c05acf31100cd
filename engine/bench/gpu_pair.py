"""The pair under load on a GPU: what each of a hundred users gets, through the frontend and gRPC.

Claim: a hundred users of an 8B model each see the first token within 500 ms and more than 50 tokens per second after
it, also when they come at random.

Goal: time to first token, 99th percentile, at most 500 ms; time per output token of a request, 99th percentile, at most
20 ms; both kept by 99 % of all requests; in the closed loop and in the open one.

Method: an engine process with dummy weights, a frontend process, and the load generator in its own, on this machine,
over gRPC; prompts are random ids, all different: the prefix cache is cold. Lengths are like Azure's conversations of
2023, 1,155 tokens in and 211 out on average, a log-normal sample of ours (`engine.bench.gpu.lengths`), or those of
`--trace`. A short closed loop finds the rate and warms up. Then `--users` users in a closed loop, each asking again as
soon as it is answered, and a Poisson process at the rate that these users reached; of both, the first 10 s and all that
comes after the last arrival are left out, which leaves about 60 s. Time to first token counts from when a request was
due. Percentiles and shares are of requests. The floor of the time per token is that of a step in which as many
decode as were under way on average, and new prompts take their share (`engine.bench.floor`).

A machine without a network needs the wheels of the servers' packages, in a folder that CHAIRLIFT_WHEELS names. With
`--device cpu` the engine runs its CPU kernels, which need numba.
"""

import argparse
import itertools
import math
from dataclasses import replace
from pathlib import Path

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings, positive
from chairlift.bench.report import Result
from engine.bench.engine_options import engine_flags
from engine.bench.floor import Length
from engine.bench.gpu.lengths import AZURE_LIKE, mean_length, sample_lengths, scaled, trace_lengths
from engine.bench.gpu.load import LoadResult, run_load, served_pair
from engine.bench.gpu.setting import GpuSetting, add_gpu_arguments
from engine.bench.gpu.stage import run_stage
from engine.bench.gpu.wheels import require_serving_packages

_TTFT_MS, _TPOT_MS, _SHARE = 500.0, 20.0, 99.0
_NUM_USERS = 100
_NUM_SEATS = 256
_MAX_NUM_BATCHED_TOKENS = 2048  # a chunk of a prompt that the answers of a hundred others wait for
_MAX_MODEL_LEN = 16384
_WARM_UP_S, _WINDOW_S = 10.0, 60.0
_SCOUT_ROUNDS = 3  # answers of every user before the rate is believed
_DRAIN_S = 30.0
_QUICK_SCALE = 1 / 64


def run(settings: Settings) -> Outcome:
    """Runs both loads."""
    return run_stage(settings, lambda setting: _measure(setting, settings))


def _measure(setting: GpuSetting, settings: Settings) -> None:
    options = settings.options
    require_serving_packages()
    lengths = _lengths(settings)
    num_users = 4 if settings.quick else options.users
    config = setting.engine_config(
        max_num_seqs=8 if settings.quick else _NUM_SEATS,
        max_num_batched_tokens=64 if settings.quick else _MAX_NUM_BATCHED_TOKENS,
        max_model_len=max(sum(length) for length in lengths) + 1,
    )
    if not setting.device.is_gpu:  # interpreted kernels are too slow to serve
        config = replace(config, device="cpu", threads=setting.threads, enforce_eager=False)
        config = replace(config, quantization=None, kv_cache_dtype="auto")
    setting.progress(f"starting the pair, {setting.label}")
    with served_pair(engine_flags(config), settings.scratch / "pair") as address:
        load = _Load(setting, f"grpc://{address}", lengths, settings.scratch, options)
        scout = load.closed("scout", num_users, _SCOUT_ROUNDS * num_users, warm_up_s=0.0)
        rate = scout.document["completed"] / scout.document["duration"]
        closed = load.closed("closed", num_users, math.ceil(rate * load.seconds) + num_users, warm_up_s=load.warm_up_s)
        _add_figures(setting, f"{num_users} users, closed loop", closed, lengths)
        rate = closed.requests_per_s
        needed_s = load.seconds + _DRAIN_S
        if not setting.quick and not setting.budget.allows(needed_s):
            setting.journal.leave_out(f"Poisson arrivals at {rate:.2f} requests/s, {setting.label}")
            return
        opened = load.poisson("poisson", rate, math.ceil(rate * load.seconds))
        _add_figures(setting, f"Poisson, {rate:.2f} requests/s", opened, lengths)


class _Load:
    """Runs loads against one server.

    Attributes:
        seconds: of the schedule of a run that counts, warm-up included.
        warm_up_s: of it.
    """

    def __init__(
        self,
        setting: GpuSetting,
        target: str,
        lengths: tuple[Length, ...],
        folder: Path,
        options: argparse.Namespace,
    ) -> None:
        self._setting = setting
        self._target = target
        self._lengths = itertools.cycle(lengths)
        self._folder = folder
        self.warm_up_s = 0.2 if setting.quick else _WARM_UP_S
        self.seconds = 1.0 if setting.quick else self.warm_up_s + options.window

    def closed(self, name: str, num_users: int, num_requests: int, *, warm_up_s: float) -> LoadResult:
        """Runs a closed loop: `num_users` requests are always in flight."""
        return self._run(name, num_requests, ["--concurrency", str(num_users), "--warmup", f"{warm_up_s:g}s"])

    def poisson(self, name: str, rate: float, num_requests: int) -> LoadResult:
        """Runs an open loop: Poisson arrivals, `rate` requests/s on average."""
        return self._run(
            name,
            num_requests,
            ["--request-rate", f"{rate:.6g}", "--warmup", f"{self.warm_up_s:g}s", "--burstiness", "1"],
        )

    def _run(self, name: str, num_requests: int, flags: list[str]) -> LoadResult:
        self._setting.progress(f"{name}: {num_requests:,} requests")
        result = run_load(
            self._target,
            list(itertools.islice(self._lengths, num_requests)),
            self._folder / name,
            [*flags, "--goodput", f"ttft:{_TTFT_MS:g}", f"tpot:{_TPOT_MS:g}"],
            timeout_s=max(60.0, self._setting.budget.left_s),
        )
        self._setting.journal.keep({name: result.document})
        if result.document["failed"]:
            raise BenchmarkError(
                f"{name}: {result.document['failed']} requests failed: {result.document['errors'][:1]}"
            )
        return result


def _add_figures(setting: GpuSetting, what: str, result: LoadResult, lengths: tuple[Length, ...]) -> None:
    """What its users got; an INVALID run has no figures, only a problem."""
    if not result.is_valid and not setting.quick:
        setting.journal.fail(f"{what}: {result.verdict}")
        return
    batch = max(1, round(result.mean_in_flight))
    token_s = setting.floor.seconds_per_output_token(lengths, batch)
    prompt, output = mean_length(lengths)
    note = f"{result.window_s:.0f} s, lengths {prompt:,.0f}/{output:,.0f} on average; {result.verdict}"
    what = f"{what}, {setting.label}"
    for figure in (
        Result("users", f"TTFT p99, {what}", result.latency_ms("ttft", "p99"), "ms", direction="at most", goal=_TTFT_MS,
               note=f"p50 {result.latency_ms('ttft', 'p50'):,.0f} ms; {note}"),
        Result("users", f"TPOT p99, {what}", result.latency_ms("tpot", "p99"), "ms", direction="at most", goal=_TPOT_MS,
               floor=1e3 * token_s * batch,
               note=f"p50 {result.latency_ms('tpot', 'p50'):.3g} ms; {batch} under way on average"),
        Result("users", f"requests within {_TTFT_MS:g} ms and {_TPOT_MS:g} ms per token, {what}",
               100 * result.attainment, "%", goal=_SHARE),
        Result("", f"output tokens, {what}", result.output_tokens_per_s, "tok/s", floor=1 / token_s,
               note=f"{result.requests_per_s:.2f} requests/s"),
    ):  # fmt: skip
        setting.journal.add(figure)


def _lengths(settings: Settings) -> tuple[Length, ...]:
    """Of the trace or of the sample, those that fit the model."""
    options = settings.options
    if options.trace is None:
        lengths = sample_lengths(AZURE_LIKE)
    else:
        try:
            lengths = trace_lengths(options.trace)
        except (OSError, ValueError) as error:
            raise BenchmarkError(f"--trace: {error}") from error
    if settings.quick:
        return scaled(lengths[:256], _QUICK_SCALE)
    return tuple(length for length in lengths if sum(length) < _MAX_MODEL_LEN)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_gpu_arguments(parser)
    parser.add_argument("--users", type=positive, default=_NUM_USERS, help="in the closed loop (default: %(default)s)")
    parser.add_argument(
        "--window", type=float, default=_WINDOW_S, metavar="S", help="seconds of steady state (default: %(default)g)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="take lengths from this trace of Azure's form, .csv or .csv.gz"
    )
