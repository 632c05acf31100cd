"""`mock-server`: a server without a model whose latencies are known exactly, until Ctrl-C."""

import argparse
import asyncio
import signal
from typing import cast

from loadgen.cli.flags import Flag, add_flags
from loadgen.cli.values import at_least_one, duration_s, share
from loadgen.errors import TargetError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.running import MockApi, mock_server
from loadgen.target.connection_errors import system_reason

_USUAL = MockBehaviour()


def _port(text: str) -> int:
    number = _count(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


_FLAGS = (
    Flag("--api", "Chairlift's gRPC API or OpenAI-compatible HTTP", default="grpc", choices=("grpc", "openai")),
    Flag("--host", "address to listen on", default="127.0.0.1"),
    Flag("--port", "port to listen on; 0 selects a free one", _port, default=50051),
)
_BEHAVIOUR = (
    ("model", str, "model name to report"),
    ("ttft_s", duration_s, "time to first token"),
    ("itl_s", duration_s, "inter-token latency"),
    ("jitter", share, "random share of each inter-token latency, up or down"),
    ("tokens_per_message", at_least_one, "tokens per message after the first"),
    ("stall_s", duration_s, "duration of one stall of all answers"),
    ("stall_at_s", duration_s, "start of the stall, after the first request"),
    ("error_rate", share, "share of requests that fail"),
    ("output_share", share, "share of the requested tokens that is sent"),
    ("cached_share", share, "share of prompts reported as cached"),
    ("overhead_tokens", _count, "tokens added to text prompts"),
    ("max_model_len", at_least_one, "context length to report"),
    ("vocab_size", at_least_one, "vocabulary size to report"),
    ("seed", int, "random seed of jitter and errors"),
)
"""Fields of MockBehaviour that have a flag: how a value is parsed, and what the help says."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "mock-server",
        help="run a server without a model, with exact latencies",
        description="Serves answers at times that are chosen here. DURATION is as 50ms, 2s; without a unit, seconds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_flags(parser, _FLAGS)
    for name, parse, what in _BEHAVIOUR:
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        add_flags(parser, [Flag(flag, what, parse, "N" if parse is _count else "", getattr(_USUAL, name))])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status."""
    behaviour = MockBehaviour(**{name: getattr(options, name.removesuffix("_s")) for name, _, _ in _BEHAVIOUR})
    asyncio.run(_serve(cast("MockApi", options.api), behaviour, options.host, options.port))
    return 0


async def _serve(api: MockApi, behaviour: MockBehaviour, host: str, port: int) -> None:
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    server = mock_server(api, behaviour, host, port)
    try:
        await server.start()
    except OSError as error:
        raise TargetError(
            f"--host {host} --port {port}: {system_reason(error)}; choose another address, --port 0 takes a free port"
        ) from error
    print(f"serving on {server.url}", flush=True)
    await over.wait()
    await server.close()
    answered = server.record.answered()
    print(
        f"{len(answered)} requests, {sum(request.num_sent for request in answered)} tokens sent, "
        f"at most {server.record.max_open} requests at once"
    )
