"""`simulate`: an engine or a fleet under virtual time: what it would serve, by policy, and how many are needed."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from chairlift.service.flag_kinds import ANY_TEXT, choice, integer, notation, number, repeated, switch
from chairlift.service.flags import Flag, FlagParser
from chairlift.service.service_classes import ServiceClass
from loadgen.atomic_file import writing_to
from loadgen.cli.flags import add_flags
from loadgen.cli.latency_target_flags import CLASS_FLAGS, classes_of
from loadgen.cli.trace_options import read, transformed
from loadgen.cli.values import ABOVE_ZERO, DURATION, FILE, FOLDER, POSITIVE, SHARE
from loadgen.cli.workload_options import add_trace_arguments
from loadgen.cli.workload_text import describe
from loadgen.errors import OptionError
from loadgen.plain_json import to_json
from loadgen.report.simulation_text import cost_line, fit_lines, load_lines, sizing_lines
from loadgen.simulation.calibration import Fit, fit_steps
from loadgen.simulation.fleet import FleetOptions
from loadgen.simulation.policies import BASELINES, PolicySpec, parse_policy
from loadgen.simulation.sizing import Sizing, engines_for
from loadgen.simulation.step_cost import DEVICES, StepCost
from loadgen.simulation.step_log import read_step_log
from loadgen.simulation.study import LoadResult, Workload, simulate_policy, study
from loadgen.trace.schema import Trace

_NOISE, _STALL_SHARE = 0.03, 0.0005
_MAX_ENGINES = 10_000


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(POSITIVE.value_of(part) for part in text.split(","))


_MULTIPLES = notation(_numbers, "numbers above 0, separated by commas", "X,...")
_FLEET_FLAGS = (
    Flag("--engines", "engines of the fleet (default: 1)", integer(1, _MAX_ENGINES)),
    Flag("--engines-for", "find the number of engines with this share of good requests, such as 0.99", SHARE),
    Flag("--max-engines", "largest fleet for --engines-for (default: 1024)", integer(1, _MAX_ENGINES)),
    Flag("--device", "device and model (default: h200-8b)", choice(tuple(DEVICES))),
    Flag("--step-log", "fit the step times to a log of the engine's --step-log instead of --device", FILE),
    Flag("--kv-cache-tokens", "KV cache of an engine in tokens (default: of the device; needed with --step-log)",
         integer(1)),
    Flag("--block-size", "tokens per block (default: %(default)s); larger ones save memory in large fleets",
         integer(1), default=16),
    Flag("--max-num-seqs", "running requests per engine (default: %(default)s)", integer(1), default=256),
    Flag("--steps-in-flight", "of the step loop (default: of the device, 1 with --step-log)", integer(1)),
    Flag("--prefix-cache", "share equal prefixes (default: yes)", switch(), default=True),
    Flag("--placement-rates", "placement by predicted first token (default: yes)", switch(), default=True),
    Flag("--noise", "standard deviation of a step's logarithm (default: 0.03, that of the fit with --step-log)",
         number(0, 1)),
    Flag("--stall-share", "share of steps that stall for 50 ms (default: 0.0005, 0 with --step-log)", SHARE),
    Flag("--transit", "time that frontend, connections and client add to the first token (default: 0)", DURATION,
         default=0.0),
)  # fmt: skip
_REQUEST_FLAGS = (
    *CLASS_FLAGS,
    Flag("--policy", "policies, each NAME or NAME@BUDGET (default: fcfs)", repeated(ANY_TEXT, takes_several=True)),
    Flag("--baselines", "also simulate the baselines", switch()),
    Flag("--loads", "multiples of the rate to simulate, such as 1,2,3 (default: 1)", _MULTIPLES, default=(1.0,)),
    Flag("--duration", "length of every replay, with the first of the requests that fill it (default: all)",
         ABOVE_ZERO),
    Flag("--repeats", "replays, each of a later part of the trace with its own seed (default: %(default)s)",
         integer(1), default=1),
    Flag("--shift", "requests between the beginnings of two repeats (default: %(default)s)", integer(1),
         default=1500),
    Flag("--warmup", "do not count arrivals before (default: 0)", DURATION, default=0.0),
    Flag("--grace", "time after the last arrival until which answers may end (default: 30 s)", DURATION,
         default=30.0),
)  # fmt: skip
_OUTPUT_FLAGS = (
    Flag("--json", "file for all results", FILE),
    Flag("--draw", "folder for pictures, SVG and PNG", FOLDER),
)


class _Engine(NamedTuple):
    cost: StepCost
    kv_cache_tokens: int
    num_accelerators: int
    max_steps_in_flight: int
    noise: float
    stall_share: float
    fit: Fit | None


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Replays a trace in virtual time: the scheduler, block pool and placement of production, with a\n"
        "model of step times in place of the device. With --step-log and no --trace: only fits that model.",
        epilog=f"baselines: {', '.join(BASELINES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_arguments(parser)
    add_flags(parser.add_argument_group("fleet"), _FLEET_FLAGS)
    add_flags(parser.add_argument_group("requests"), _REQUEST_FLAGS)
    add_flags(parser.add_argument_group("output"), _OUTPUT_FLAGS)
    return parser


def run(options: argparse.Namespace) -> int:
    """Simulates; returns the exit status.

    Raises: LoadgenError: a wrong flag or file.
    """
    engine = _engine(options)
    if options.trace is None:
        if engine.fit is None:
            raise OptionError("--trace FILE is missing")
        return 0
    classes = classes_of(options.service_classes)
    policies = _policies(options, list(classes.values()))
    _refuse_contradictions(options)
    trace = transformed(read(options.trace, options), options)
    if options.draw is not None and trace.span_s == 0:
        raise OptionError(f"--draw {options.draw}: pictures show rates, and all requests arrive at once; leave it out")
    workload = Workload(
        trace=trace,
        classes=classes,
        mix=options.mix or {},
        duration_s=options.duration,
        num_repeats=options.repeats,
        shift=options.shift,
        warmup_s=options.warmup,
        grace_s=options.grace,
        seed=options.seed,
    )
    fleet = _fleet(options, engine, trace, policies[0])
    print(describe(trace))
    size = "any number" if options.engines_for else options.engines or 1
    print(f"engines    {size}, KV cache of {engine.kv_cache_tokens:,} tokens; {cost_line(engine.cost)}")
    if options.engines_for is not None:
        return _size(options, workload, fleet, engine)
    studied = study(workload, fleet, policies, options.loads, num_accelerators=engine.num_accelerators)
    for one in studied:
        print()
        for line in load_lines(one):
            print(line)
    _write(options, engine, {"loads": studied})
    if options.draw is not None:
        _draw(studied, options.draw)
    return 0


def _engine(options: argparse.Namespace) -> _Engine:
    if options.step_log is None:
        device = DEVICES[options.device or "h200-8b"]
        kv_cache_tokens = options.kv_cache_tokens or device.kv_cache_tokens
        in_flight = options.steps_in_flight or device.max_steps_in_flight
        return _Engine(device.cost, kv_cache_tokens, device.num_accelerators, in_flight, _NOISE, _STALL_SHARE, None)
    if options.device is not None:
        raise OptionError(f"--device {options.device} and --step-log both give the step times; give one of them")
    log = read_step_log(options.step_log)
    fit = fit_steps(log.steps)
    for line in fit_lines(fit, log.num_left_out):
        print(line)
    if options.trace is not None and options.kv_cache_tokens is None:
        raise OptionError("--step-log needs --kv-cache-tokens, the capacity that the engine logs when it starts")
    return _Engine(fit.mean_cost, options.kv_cache_tokens or 0, 1, options.steps_in_flight or 1, fit.noise, 0.0, fit)


def _refuse_contradictions(options: argparse.Namespace) -> None:
    """Raises: OptionError: flags that exclude each other, or that do nothing without another."""
    if options.engines_for is None:
        if options.max_engines is not None:
            raise OptionError(f"--max-engines {options.max_engines} needs --engines-for, whose search it limits")
        return
    if not options.engines_for:
        raise OptionError("--engines-for is 0, any fleet has that share; it must be above 0")
    if len(options.loads) != 1 or len(options.policy or ()) > 1 or options.baselines:
        raise OptionError("--engines-for takes one policy and one load; leave --baselines and further ones out")
    for name in ("engines", "draw"):
        if (value := getattr(options, name)) is not None:
            goal = f"--engines-for {options.engines_for:g}"
            raise OptionError(f"{goal} searches for the size of a fleet; leave --{name} {value} out")


def _policies(options: argparse.Namespace, classes: list[ServiceClass]) -> list[PolicySpec]:
    names = dict.fromkeys([*(options.policy or ["fcfs"]), *(BASELINES if options.baselines else ())])
    return [parse_policy(name, classes) for name in names]


def _fleet(options: argparse.Namespace, engine: _Engine, trace: Trace, policy: PolicySpec) -> FleetOptions:
    longest = int((trace.input_tokens + trace.output_tokens).max()) + 1
    capacity = engine.kv_cache_tokens // options.block_size * options.block_size
    if capacity == 0:
        raise OptionError(
            f"--block-size {options.block_size}: the KV cache of an engine holds {engine.kv_cache_tokens} tokens, less "
            "than one block"
        )
    if longest > capacity:
        raise OptionError(
            f"a request has {longest - 1} tokens, the KV cache of an engine holds {capacity}; leave such requests out "
            "with --max-model-len"
        )
    return FleetOptions(
        num_engines=options.engines or 1,
        cost=engine.cost,
        policy=policy,
        kv_cache_tokens=engine.kv_cache_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=min(capacity, max(longest, 4096)),
        block_size=options.block_size,
        max_steps_in_flight=engine.max_steps_in_flight,
        has_prefix_cache=options.prefix_cache and trace.blocks is not None,
        knows_rates=options.placement_rates,
        noise=engine.noise if options.noise is None else options.noise,
        stall_share=engine.stall_share if options.stall_share is None else options.stall_share,
        transit_s=options.transit,
    )


def _size(options: argparse.Namespace, workload: Workload, fleet: FleetOptions, engine: _Engine) -> int:
    """Answers `--engines-for`; status 1 if the largest fleet is not enough."""

    def good_share(num_engines: int) -> float:
        sized = replace(fleet, num_engines=num_engines)
        return simulate_policy(workload, sized, options.loads[0]).total.good_share

    sizing: Sizing = engines_for(good_share, options.engines_for, options.max_engines or 1024)
    for line in sizing_lines(sizing, options.engines_for):
        print(line)
    _write(options, engine, {"sizing": sizing})
    return 0 if sizing.num_engines is not None else 1


def _write(options: argparse.Namespace, engine: _Engine, results: dict[str, object]) -> None:
    if options.json is None:
        return
    about = {"command": shlex.join(options.command_line), "cost": engine.cost, "fit": engine.fit}
    with writing_to(options.json.parent):
        options.json.write_text(to_json({**about, **results}, indent=1) + "\n", encoding="utf-8")
    print(f"results    {options.json}")


def _draw(studied: list[LoadResult], folder: Path) -> None:
    from loadgen.report.plot_simulation import simulation_pictures  # matplotlib: only if pictures are drawn
    from loadgen.report.plot_style import png, svg

    with writing_to(folder):
        for picture in simulation_pictures(studied):
            (folder / f"{picture.name}.png").write_bytes(png(picture))
            (folder / f"{picture.name}.svg").write_text(svg(picture), encoding="utf-8")
            print(f"picture    {folder / picture.name}.png")
