"""`mock-server`: a server without a model whose latencies are known exactly, until Ctrl-C."""

import argparse
import asyncio
import signal
from typing import cast

from loadgen.cli.values import at_least_one, duration_s, share
from loadgen.errors import TargetError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.running import MockApi, mock_server
from loadgen.target.connection_errors import system_reason

_USUAL = MockBehaviour()


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "mock-server",
        help="run a server without a model, with exact latencies",
        description="Serves answers at times that are chosen here. DURATION is as 50ms, 2s; without a unit, seconds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--api", choices=("grpc", "openai"), default="grpc", help="Chairlift's gRPC API or OpenAI-compatible HTTP")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=50051, help="port to listen on; 0 selects a free one (default: %(default)s)")
    add("--model", default=_USUAL.model, help="model name to report (default: %(default)s)")
    for flag, kind, default, metavar, what in (
        ("--ttft", duration_s, _USUAL.ttft_s, "DURATION", "time to first token"),
        ("--itl", duration_s, _USUAL.itl_s, "DURATION", "inter-token latency"),
        ("--jitter", share, _USUAL.jitter, "SHARE", "random share of each inter-token latency, up or down"),
        ("--tokens-per-message", at_least_one, _USUAL.tokens_per_message, "N", "tokens per message after the first"),
        ("--stall", duration_s, _USUAL.stall_s, "DURATION", "duration of one stall of all answers"),
        ("--stall-at", duration_s, _USUAL.stall_at_s, "DURATION", "start of the stall, after the first request"),
        ("--error-rate", share, _USUAL.error_rate, "SHARE", "share of requests that fail"),
        ("--output-share", share, _USUAL.output_share, "SHARE", "share of the requested tokens that is sent"),
        ("--cached-share", share, _USUAL.cached_share, "SHARE", "share of prompts reported as cached"),
        ("--overhead-tokens", _count, _USUAL.overhead_tokens, "N", "tokens added to text prompts"),
        ("--max-model-len", at_least_one, _USUAL.max_model_len, "N", "context length to report"),
        ("--vocab-size", at_least_one, _USUAL.vocab_size, "N", "vocabulary size to report"),
        ("--seed", int, _USUAL.seed, "N", "random seed of jitter and errors"),
    ):
        add(flag, type=kind, default=default, metavar=metavar, help=f"{what} (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status."""
    behaviour = MockBehaviour(
        ttft_s=options.ttft,
        itl_s=options.itl,
        jitter=options.jitter,
        tokens_per_message=options.tokens_per_message,
        stall_s=options.stall,
        stall_at_s=options.stall_at,
        error_rate=options.error_rate,
        output_share=options.output_share,
        cached_share=options.cached_share,
        overhead_tokens=options.overhead_tokens,
        model=options.model,
        max_model_len=options.max_model_len,
        vocab_size=options.vocab_size,
        seed=options.seed,
    )
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


def _port(text: str) -> int:
    number = _count(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
