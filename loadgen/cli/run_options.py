"""Flags of every run, and its steps: send, measure, judge, print, save."""

import argparse
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from rich.console import Console

from chairlift.service.flag_kinds import ANY_TEXT, choice, integer, number, optional, repeated, switch
from chairlift.service.flags import Flag
from loadgen.checks.selfcheck import Verdict, judge
from loadgen.cli.flags import ExitStatus, add_flags
from loadgen.cli.latency_target_flags import LATENCY_TARGET_FLAGS, service_mix
from loadgen.cli.result_folder import result_folder
from loadgen.cli.synthetic_options import asked_rate
from loadgen.cli.values import DURATION, FILE, FOLDER, PERCENTILES, SHARE, SLO, TAG, by_name
from loadgen.cli.workload_text import describe, overlong_warning
from loadgen.errors import OptionError, ResultError, TargetError
from loadgen.host import describe_host
from loadgen.measure.metrics import MeasureOptions, Metrics, measure
from loadgen.measure.samples import samples_of
from loadgen.prompts.token_ids import Vocabulary
from loadgen.record import RunData
from loadgen.report.live import live_panel
from loadgen.report.terminal import print_summary
from loadgen.run.controller import RunOptions, run_workload
from loadgen.server_metrics import read_server_metrics
from loadgen.store import save
from loadgen.target.base import PromptMode, TargetFacts, TargetSpec
from loadgen.target.open import SCHEMES, api_key_of, check_spec
from loadgen.trace.schema import Trace

DEFAULT_TARGET = "grpc://127.0.0.1:50051"
_TARGET_HELP = (
    "grpc(s)://HOST:PORT, grpc+unix:PATH, http(s)://HOST:PORT/v1 (OpenAI-compatible), or null:; the API key is "
    "CHAIRLIFT_API_KEY, for HTTP OPENAI_API_KEY [CHAIRLIFT_TARGET] (default: %(default)s)"
)


class Outcome(NamedTuple):
    """A run with its metrics and verdict. `folder` holds its records and reports."""

    run: RunData
    metrics: Metrics
    verdict: Verdict
    folder: Path


CONCURRENCY_FLAG = Flag(
    "--concurrency", "closed loop with this many requests in flight; a slow server lowers its own load", integer(1)
)
STRICT_FLAG = Flag("--strict", "exit with status 3 when the run is INVALID", switch())
_TARGET_FLAGS = (
    Flag(
        "--api",
        "API of the server (default: grpc for grpc URLs, completions for http URLs)",
        choice(("grpc", "completions", "chat")),
    ),
    Flag("--model", "model name in requests (default: the only model of the server)", ANY_TEXT, "NAME", ""),
    Flag(
        "--prompt-mode",
        "send prompts as token ids or as text (default: text for chat, else ids)",
        choice(("ids", "text")),
    ),
    Flag("--vocab-size", "token ids to draw prompts from (default: reported by the server)", integer(1)),
    Flag("--temperature", "sampling temperature (default: %(default)g, greedy)", number(0), "T", 0.0),
    Flag("--ignore-eos", "generate exactly the planned number of tokens (default: yes)", switch(), default=True),
    Flag("--timeout", "timeout of one request, counted from sending (default: none)", DURATION),
    Flag("--tls-ca", "trusted CA certificates for grpcs and https (default: those of the system)", FILE),
    Flag("--tls-cert", "client certificate for mutual TLS", FILE),
    Flag("--tls-key", "private key of --tls-cert", FILE),
    Flag("--metrics-url", "Prometheus endpoint to save before and after the run (default: none)", ANY_TEXT, "URL"),
)
_LOAD_FLAGS = (
    Flag(
        "--workers",
        "client processes (default: auto, as many as the load needs)",
        optional(integer(1), "auto"),
        "N|auto",
    ),
    Flag(
        "--max-concurrency",
        "limit of requests in flight; the wait of the others counts as latency (default: none)",
        integer(1),
    ),
    Flag(
        "--overflow",
        "whether requests over --max-concurrency wait or are dropped (default: %(default)s)",
        choice(("queue", "drop")),
        default="queue",
    ),
    Flag("--cancel-rate", "share of calls to cancel deliberately, 0 to 1 (default: 0)", SHARE, default=0.0),
    Flag(
        "--drain-timeout",
        "time for answers to finish after the last request was due; in a closed loop also the longest wait for an "
        "answer to end (default: %(default)g s)",
        DURATION,
        default=600.0,
    ),
    Flag(
        "--prompt-salt",
        "fix the prompts (default: new prompts in every run, so that nothing is cached)",
        ANY_TEXT,
        "TEXT",
    ),
)
_MEASURE_FLAGS = (
    Flag("--warmup", "exclude this first part from latencies (default: 0)", DURATION, default=0.0),
    Flag(
        "--goodput",
        "latency limits of goodput in ms, such as ttft:500 tpot:50 e2el:15000",
        repeated(SLO, takes_several=True),
        default=[],
        aliases=["--slo"],
    ),
    Flag(
        "--metric-percentiles",
        "percentiles to report (default: 50,90,95,99,99.9)",
        PERCENTILES,
        default=(50.0, 90.0, 95.0, 99.0, 99.9),
    ),
)
_RESULT_FLAGS = (
    Flag("--max-error-rate", "share of errors and timeouts above which a run is INVALID (default: 0.05)", SHARE),
    Flag("--result-dir", "folder for the results (default: loadgen-results/VERB-TIME)", FOLDER),
    Flag("--tag", "stored with the results; may be repeated", repeated(TAG), default=[]),
    STRICT_FLAG,
    Flag("--dry-run", "describe the workload without sending it", switch()),
)


def add_run_arguments(parser: argparse.ArgumentParser, *, with_target: bool = True) -> None:
    """Adds the flags of every run; without `--target` where a verb has its own way to name servers."""
    group = parser.add_argument_group("server")
    if with_target:
        default = _target_of(os.environ.get("CHAIRLIFT_TARGET", "")) or DEFAULT_TARGET
        add_flags(group, [Flag("--target", _TARGET_HELP, ANY_TEXT, "URL", default)])
    add_flags(group, _TARGET_FLAGS)
    add_flags(parser.add_argument_group("load"), _LOAD_FLAGS)
    add_flags(parser.add_argument_group("latency targets"), LATENCY_TARGET_FLAGS)
    group = parser.add_argument_group("results")
    add_measure_arguments(group)
    add_flags(group, _RESULT_FLAGS)


def add_measure_arguments(group: Any) -> None:
    """Adds the flags of `measure_options` to a parser or a group."""
    add_flags(group, _MEASURE_FLAGS)


def _target_of(address: str) -> str:
    """URL of the variable's value, which for `chairlift` itself is an address without a scheme."""
    if address.startswith("unix:"):
        return f"grpc+{address}"
    if not address or "://" in address or address.startswith(("grpc+unix:", "null:")):
        return address
    return f"grpc://{address}"


def target_spec(options: argparse.Namespace, url: str | None = None) -> TargetSpec:
    """Returns the server under test.

    Raises:
        OptionError: a URL that no API fits.
        TargetError: as `check_spec`.
    """
    url = options.target if url is None else url
    scheme = url.partition(":")[0]
    apis = [api for api, schemes in SCHEMES.items() if scheme in schemes]
    if not apis:
        meant = f"; did you mean {_target_of(url)}?" if re.fullmatch(r"unix:.+|[^/]+:\d+", url) else ""
        known = ", ".join(dict.fromkeys(f"{each}:" for schemes in SCHEMES.values() for each in schemes))
        raise OptionError(f"--target {url}: must begin with {known}{meant}")
    api = options.api or apis[0]
    spec = TargetSpec(
        url=url,
        api=api,
        model=options.model,
        prompt_mode=cast("PromptMode", options.prompt_mode or ("text" if api == "chat" else "ids")),
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        timeout_s=options.timeout,
        api_key=api_key_of(api),
        tls_ca=options.tls_ca,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
    )
    check_spec(spec)
    return spec


def check_run_flags(options: argparse.Namespace) -> None:
    """Refuses flags of `add_run_arguments` that contradict each other, before anything is printed or run.

    Raises: OptionError, TargetError: as `target_spec`, `run_options` and `measure_options`; or a tag has two values.
    """
    if hasattr(options, "target"):
        target_spec(options)
    run_options(options)
    measure_options(options)
    by_name("--tag", options.tag)


def run_options(
    options: argparse.Namespace, salt: str | None = None, vocabulary: Vocabulary | None = None
) -> RunOptions:
    """Returns how to send: prompts are new unless a salt is given here or by flag.

    Raises: OptionError: flags contradict each other, or a file of service classes cannot be used.
    """
    return RunOptions(
        workers=options.workers,
        concurrency=getattr(options, "concurrency", None),
        max_concurrency=options.max_concurrency,
        overflow=cast("Literal['queue', 'drop']", options.overflow),
        salt=salt or options.prompt_salt or "",
        seed=options.seed,
        cancel_rate=options.cancel_rate,
        drain_timeout_s=options.drain_timeout,
        vocab_size=options.vocab_size,
        vocabulary=vocabulary,
        targets=service_mix(options),
        max_retries=options.max_retries,
    )


def measure_options(options: argparse.Namespace) -> MeasureOptions:
    """Returns what to measure. Raises: OptionError: a metric has two limits."""
    return MeasureOptions(
        warmup_s=options.warmup,
        slo=by_name("--goodput", options.goodput),
        percentiles=tuple(options.metric_percentiles),
    )


def run_and_report(
    workload: Trace,
    options: argparse.Namespace,
    folder: Path,
    *,
    spec: TargetSpec | None = None,
    salt: str | None = None,
    vocabulary: Vocabulary | None = None,
) -> Outcome:
    """Runs a workload with live progress, judges it, and writes everything into a folder.

    Files are written before the summary is printed, so that an interrupted terminal loses no results.

    Args:
        workload: arrivals from 0.
        options: with the flags of this module.
        folder: exists and is empty.
        spec: the server; None is the one of `--target`.
        salt: of the prompts; None is `--prompt-salt`, or a fresh one.
        vocabulary: of the prompts; None is what the server says.

    Raises:
        TargetError: the server cannot be reached or measured.
        ResultError: the results cannot be written; the summary has been printed all the same.
    """
    from loadgen.report.files import write_report  # draws: half a second to import, before anything is run

    spec = spec or target_spec(options)
    plan = run_options(options, salt, vocabulary)
    before = read_server_metrics(options.metrics_url, spec) if options.metrics_url else None
    console = Console(stderr=True)

    def on_opened(facts: TargetFacts) -> None:
        can_scale = getattr(options, "trace", None) is not None
        if warning := overlong_warning(workload, facts.max_model_len, can_scale=can_scale):
            console.print(warning, style="yellow", highlight=False, soft_wrap=True)

    def on_interrupt(num_in_flight: int) -> None:
        requests = f"{num_in_flight:,} request{'s' * (num_in_flight != 1)} in flight"
        console.print(
            f"interrupted: {requests} aborted; writing the report of this run, Ctrl-C again ends without it",
            highlight=False,
            soft_wrap=True,
        )

    with live_panel(console) as on_progress:
        run = run_workload(workload, spec, plan, on_progress, on_opened=on_opened, on_interrupt=on_interrupt)
    server_metrics = None if before is None else (before, _metrics_after(options.metrics_url, spec, console))
    run = replace(run, settings={**run.settings, **_settings(options)}, server_metrics=server_metrics)
    samples = samples_of(run)
    metrics = measure(run, measure_options(options), samples)
    verdict = judge(run, metrics, samples=samples)
    try:
        save(run, folder)
        write_report(run, metrics, verdict, folder, samples)
    except ResultError:
        print_summary(Console(), run, metrics, verdict)
        raise
    print_summary(Console(), run, metrics, verdict, folder)
    return Outcome(run, metrics, verdict, folder)


def _metrics_after(url: str, spec: TargetSpec, console: Console) -> str:
    """Returns the server's metrics after the run, or a comment that says why there are none: the run is kept."""
    try:
        return read_server_metrics(url, spec)
    except TargetError as error:
        text = f"warning: no metrics of the server after the run: {error}"
        console.print(text, style="yellow", soft_wrap=True, markup=False)
        return f"# not read: {error}\n"


def run_or_describe(workload: Trace, options: argparse.Namespace, verb: str) -> int:
    """Describes the workload of `replay` or `run` and, without `--dry-run`, runs it into a folder.

    Raises:
        LoadgenError: as `check_run_flags`, `result_folder` and `run_and_report`.
    """
    check_run_flags(options)
    print(describe(workload, asked_rate(options)))
    if options.dry_run:
        return 0
    with result_folder(options.result_dir, verb) as folder:
        return exit_status(run_and_report(workload, options, folder), options)


def exit_status(outcome: Outcome, options: argparse.Namespace) -> int:
    """Exit status of the command."""
    if outcome.run.interrupted:
        return ExitStatus.INTERRUPTED
    return ExitStatus.INVALID if options.strict and outcome.verdict.level == "INVALID" else 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings that a result stores."""
    return {
        "command": options.command_line,
        "pinned_salt": bool(options.prompt_salt),
        "tags": by_name("--tag", options.tag),
        "measure": measure_options(options).as_json(),
        "max_error_rate": options.max_error_rate,
        "asked_rate_per_s": asked_rate(options),
        "host": describe_host(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
