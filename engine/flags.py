"""Command line and environment -> EngineConfig. Names and defaults are vLLM's where the thing is the same.

Every flag is an environment variable too: `--max-num-seqs` is CHAIRLIFT_MAX_NUM_SEQS; the command line wins. An empty
variable counts as unset: that is what Compose makes of one that its caller has not set. Where the frontend has a flag
of the same name for itself, the engine's variable says so: `--port` is CHAIRLIFT_ENGINE_PORT.
"""

import argparse
import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from chairlift.service.logs import LOG_FORMATS, LOG_LEVELS
from engine.config import (
    DEFAULT_STEP_LIMITS,
    DeviceName,
    DtypeName,
    EngineConfig,
    KVCacheDtypeName,
    LoadFormat,
    Quantization,
)
from engine.core.config import SchedulingPolicyName
from engine.demo import MODEL_DIR
from engine.model.shapes import shape_names

ENV_PREFIX = "CHAIRLIFT_"
ENV_NAMES = {
    flag: f"CHAIRLIFT_ENGINE_{flag.removeprefix('--').replace('-', '_').upper()}"
    for flag in ("--host", "--port", "--tls-cert", "--tls-key", "--tls-client-ca", "--insecure-bind")
}
BLOCK_SIZES = (16, 32, 64, 128)

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

_T = TypeVar("_T")
_Parse = Callable[[str], _T]


def parse_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """The configuration that flags and environment ask for.

    Args:
        argv: the command line without the program's name.
        environ: where CHAIRLIFT_* variables are looked up.
    Returns: a configuration whose single values are in range; what depends on model or device is checked when it is
    built.
    Raises: SystemExit: status 2 after one line on stderr that says what to change; status 0 after --help.
    """
    return EngineConfig(**vars(_build_parser(environ).parse_args(argv)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage of thirty flags."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As usual; what is unknown is refused with the flag that may have been meant."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("--")]
            known = [name for action in self._actions for name in action.option_strings]
            near = [name for flag in flags for name in difflib.get_close_matches(flag, known, 1, 0.7)]
            meant = f"; did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
            self.error(f"unknown: {' '.join(unknown)}{meant}")
        return options


class _Flags:
    """Adds flags whose defaults come from the environment."""

    def __init__(self, parser: _Parser, environ: Mapping[str, str]) -> None:
        self._parser = parser
        self._environ = environ
        self._group: argparse._ArgumentGroup | None = None

    def group(self, title: str) -> None:
        """Flags from here on belong to this section of the help."""
        self._group = self._parser.add_argument_group(title)

    def add(
        self,
        flag: str,
        parse: _Parse[_T],
        default: _T | None,
        text: str,
        *,
        dest: str = "",
        metavar: str | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """A flag with a value; `parse` raises ArgumentTypeError for a bad one."""
        assert self._group is not None
        self._group.add_argument(
            flag,
            *aliases,
            dest=dest or _dest(flag),
            type=parse,
            default=self._from_environment(flag, parse, default),
            metavar=metavar or "N",
            help=f"{text} [{_variable(flag)}]",
        )

    def choice(self, flag: str, choices: Sequence[str], default: str, text: str) -> None:
        """A flag with one of a few values."""
        self.add(flag, _one_of(choices), default, f"{text} (default: {default})", metavar="{" + ",".join(choices) + "}")

    def switch(self, flag: str, default: bool | None, text: str, *, default_text: str = "") -> None:
        """A flag that is on or off: --x and --no-x; where None, which is neither, means must be said."""
        assert self._group is not None
        default_text = default_text or ("on" if default else "off")
        self._group.add_argument(
            flag,
            action=argparse.BooleanOptionalAction,
            default=self._from_environment(flag, _switch_value, default),
            help=f"{text} (default: {default_text}) [{_variable(flag)}=0|1]",
        )

    def _from_environment(self, flag: str, parse: _Parse[_T], default: _T | None) -> _T | None:
        value = self._environ.get(_variable(flag))
        if not value:
            return default
        try:
            return parse(value)
        except argparse.ArgumentTypeError as error:
            self._parser.error(f"environment variable {_variable(flag)}={value}: {error}")


def _build_parser(environ: Mapping[str, str]) -> _Parser:
    parser = _Parser(
        prog="chairlift-engine",
        allow_abbrev=False,
        description="Serves a model's tokens to chairlift-frontend over gRPC. Every flag is an environment variable "
        "too, named in brackets; the command line wins.",
    )
    flags = _Flags(parser, environ)
    cpu, cuda = DEFAULT_STEP_LIMITS["cpu"], DEFAULT_STEP_LIMITS["cuda"]

    flags.group("model")
    flags.add(
        "--model", _text, str(MODEL_DIR), "folder or Hugging Face id (default: the bundled demo model)", metavar="MODEL"
    )
    flags.add(
        "--served-model-name",
        _text,
        None,
        "name that frontends see (default: the folder's name or the id)",
        metavar="NAME",
    )
    flags.choice(
        "--load-format", get_args(LoadFormat), "auto",
        f"dummy: random weights, for benchmarks; --model may then be one of {_listed(shape_names())}",
    )  # fmt: skip
    flags.choice("--dtype", get_args(DtypeName), "auto", "auto: the checkpoint's, float32 on a CPU")
    flags.add(
        "--max-model-len", _model_len, None,
        "most tokens of prompt and output; auto or -1: the model's, cut to what the cache can hold (default: auto)",
    )  # fmt: skip
    flags.add("--seed", _integer(0, 2**63 - 1), 0, "seed of dummy weights (default: 0)")

    flags.group("address and life")
    flags.add("--host", _text, "127.0.0.1", "address to listen on (default: 127.0.0.1)", metavar="HOST")
    flags.add("--port", _integer(0, 65535), 50052, "port; 0 picks a free one (default: 50052)")
    flags.add("--uds", Path, None, "listen on this unix socket instead", metavar="PATH")
    flags.add("--tls-cert", Path, None, "certificate chain of --host, PEM; then only TLS is spoken", metavar="PATH")
    flags.add("--tls-key", Path, None, "its key, PEM, not encrypted", metavar="PATH")
    flags.add(
        "--tls-client-ca", Path, None,
        "certificates, PEM; frontends must show one that these have signed", metavar="PATH",
    )  # fmt: skip
    flags.switch(
        "--insecure-bind",
        False,
        "allow a --host that other machines can reach without mutual TLS; only where something else protects it",
    )
    flags.switch(
        "--exit-on-stdin-close", False, "end when standard input closes, so that no engine outlives its parent"
    )
    flags.add(
        "--shutdown-timeout", _number(0, 86400), 30.0,
        "seconds that requests get to finish after SIGTERM (default: 30)", dest="shutdown_timeout_s", metavar="S",
    )  # fmt: skip

    flags.group("scheduling")
    flags.add(
        "--max-num-seqs", _count(1, 65536), None,
        f"requests that run at once (default: {cuda.max_num_seqs}; {cpu.max_num_seqs} on a CPU)",
    )  # fmt: skip
    flags.add(
        "--max-num-batched-tokens", _count(1, 2**20), None,
        f"tokens of one step (default: {cuda.max_num_batched_tokens}; {cpu.max_num_batched_tokens} on a CPU)",
    )  # fmt: skip
    flags.choice("--scheduling-policy", get_args(SchedulingPolicyName), "fcfs", "order in which requests are admitted")
    flags.add(
        "--max-num-queued-reqs", _count(1, 2**20), 4096, "requests that may wait; more are rejected (default: 4096)"
    )
    flags.switch(
        "--async-scheduling", None,
        "plan and launch a step while the one before it runs; the tokens are the same",
        default_text="on with a GPU, off on a CPU",
    )  # fmt: skip
    flags.add(
        "--coalesce-ms", _number(0, 1000), 25.0,
        "milliseconds that tokens may wait for the next steps, so that several leave in one message, while 8 streams "
        "or more run; first tokens and ends never wait; 0: none do (default: 25)", metavar="MS",
    )  # fmt: skip
    flags.switch(
        "--enforce-eager",
        False,
        "launch a GPU's kernels one by one, without CUDA graphs: less memory, slower decodes",
    )
    flags.add("--max-logprobs", _integer(0, 1024), 20, "most alternatives per token (default: 20)")

    flags.group("numbers")
    flags.add(
        "--quantization", _one_of(get_args(Quantization)), None,
        "quantise the weights on load, with one scale per output channel, and one per token for what they are "
        "multiplied with: int8 on a CPU, fp8 on a GPU (default: not)",
        metavar="{" + ",".join(get_args(Quantization)) + "}",
    )  # fmt: skip
    flags.choice(
        "--kv-cache-dtype", get_args(KVCacheDtypeName), "auto",
        "auto: the model's; int8 on a CPU, fp8 on a GPU: one scale per token and head",
    )  # fmt: skip
    flags.switch(
        "--batch-invariant", False,
        "promise that a request's logits are the same bits whatever shares its batches, or refuse to start; on a CPU "
        "they always are",
    )  # fmt: skip

    flags.group("KV cache")
    flags.add("--block-size", _block_size, 16, f"tokens per block, one of {_listed(BLOCK_SIZES)} (default: 16)")
    flags.switch("--enable-prefix-caching", True, "share the blocks of equal prefixes")
    flags.add(
        "--gpu-memory-utilization",
        _number(0.01, 1),
        0.92,
        "share of a GPU's memory to use (default: 0.92)",
        metavar="X",
    )
    flags.add(
        "--kv-cache-memory-bytes", _count(1, 2**50), None,
        "size of the KV cache, such as 4G (default: what --gpu-memory-utilization leaves; on a CPU half of the free "
        "memory, at most 4 GiB, and no more than --max-num-seqs requests can fill)", metavar="BYTES",
    )  # fmt: skip
    flags.add("--num-gpu-blocks-override", _count(1, 2**31 - 1), None, "blocks of KV cache, instead of a size")

    flags.group("machine")
    flags.choice("--device", get_args(DeviceName), "auto", "auto: a GPU if there is one")
    flags.add(
        "--tensor-parallel-size", _integer(1, 1024), 1,
        "processes that the model is divided among, one per GPU; on a CPU too, with plain, slow operations, for tests "
        "(default: 1)", aliases=["-tp"],
    )  # fmt: skip
    flags.add(
        "--rank-timeout", _number(1, 86400), 300.0,
        "seconds that these may keep one another waiting before the engine ends (default: 300)",
        dest="rank_timeout_s", metavar="S",
    )  # fmt: skip
    flags.add("--threads", _integer(1, 1024), None, "CPU threads of each process (default: one per core, divided)")
    flags.add("--step-log", Path, None, "append one JSON line per step to this file", metavar="FILE")
    flags.add(
        "--integrity-check-interval", _number(0, 86400), 30.0,
        "seconds between two looks through the books of blocks and requests, some ms each; a contradiction ends the "
        "engine; 0: none (default: 30)",
        dest="integrity_check_interval_s", metavar="S",
    )  # fmt: skip
    flags.add(
        "--step-timeout", _number(0, 86400), 300.0,
        "seconds for which the step loop may stand still before the engine ends: more than its longest step; 0: any "
        "number (default: 300)",
        dest="step_timeout_s", metavar="S",
    )  # fmt: skip
    flags.choice("--log-level", LOG_LEVELS, "info", "what to log on stderr")
    flags.choice("--log-format", LOG_FORMATS, "text", "json: one object per line")
    flags.add(
        "--log-stats-interval", _number(0, 86400), 10.0,
        "seconds between two lines of throughput while there is work; 0: none (default: 10)",
        dest="log_stats_interval_s", metavar="S",
    )  # fmt: skip
    return parser


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _variable(flag: str) -> str:
    return ENV_NAMES.get(flag) or ENV_PREFIX + _dest(flag).upper()


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def _text(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return value


def _one_of(choices: Sequence[str]) -> _Parse[str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise argparse.ArgumentTypeError(f"must be one of {_listed(choices)}, not {value!r}")
        return value

    return parse


def _switch_value(value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"must be one of {_listed(_TRUE + _FALSE)}")


def _integer(low: int, high: int) -> _Parse[int]:
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {value!r}") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, not {number}")
        return number

    return parse


def _count(low: int, high: int) -> _Parse[int]:
    """A whole number, or one with a suffix: 2k = 2000, 2K = 2048, 4G = 4294967296."""
    parse_integer = _integer(low, high)

    def parse(value: str) -> int:
        factor = _SUFFIXES.get(value[-1:])
        if factor is None:
            return parse_integer(value)
        try:
            return parse_integer(str(int(float(value[:-1]) * factor)))
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"must be a number with k, M or G at most, not {value!r}") from None

    return parse


def _number(low: float, high: float) -> _Parse[float]:
    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, not {value!r}") from None
        if not (math.isfinite(number) and low <= number <= high):
            raise argparse.ArgumentTypeError(f"must be between {low:g} and {high:g}, not {value}")
        return number

    return parse


def _model_len(value: str) -> int | None:
    return None if value in ("auto", "-1") else _count(2, 2**31 - 1)(value)


def _block_size(value: str) -> int:
    number = _integer(1, 2**20)(value)
    if number not in BLOCK_SIZES:
        raise argparse.ArgumentTypeError(f"must be one of {_listed(BLOCK_SIZES)}, not {number}")
    return number
