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
        help="a server without a model, with exact latencies",
        description="Serves answers at times that are chosen here. DURATION is as 50ms, 2s; without a unit, seconds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--api", choices=("grpc", "openai"), default="grpc", help="our gRPC API, or OpenAI-compatible HTTP")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_port, default=50051, help="port to listen on; 0 takes a free one")
    add("--ttft", type=duration_s, default=_USUAL.ttft_s, metavar="DURATION", help="to the first token")
    add("--itl", type=duration_s, default=_USUAL.itl_s, metavar="DURATION", help="from token to token")
    add("--jitter", type=share, default=_USUAL.jitter, metavar="SHARE", help="of each gap, up and down")
    add(
        "--tokens-per-message",
        type=at_least_one,
        default=_USUAL.tokens_per_message,
        metavar="N",
        help="after the first",
    )
    add("--stall", type=duration_s, default=_USUAL.stall_s, metavar="DURATION", help="all answers stand still so long")
    add("--stall-at", type=duration_s, default=_USUAL.stall_at_s, metavar="DURATION", help="after the first request")
    add("--error-rate", type=share, default=_USUAL.error_rate, metavar="SHARE", help="of requests that fail")
    add(
        "--output-share", type=share, default=_USUAL.output_share, metavar="SHARE", help="of the asked tokens that come"
    )
    add("--cached-share", type=share, default=_USUAL.cached_share, metavar="SHARE", help="of prompts said to be cached")
    add("--overhead-tokens", type=_count, default=_USUAL.overhead_tokens, metavar="N", help="added to prompts of text")
    add("--model", default=_USUAL.model, help="name of the model")
    add("--max-model-len", type=at_least_one, default=_USUAL.max_model_len, metavar="N", help="that it says it has")
    add("--vocab-size", type=at_least_one, default=_USUAL.vocab_size, metavar="N", help="that it says it has")
    add("--seed", type=int, default=_USUAL.seed, help="of jitter and errors")
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
    played = server.record.played()
    print(
        f"{len(played)} requests, {sum(request.num_sent for request in played)} tokens sent, "
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
