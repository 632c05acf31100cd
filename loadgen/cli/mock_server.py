"""`mock-server`: a server without a model whose latencies are known exactly, until Ctrl-C."""

import argparse
import asyncio
import signal
from typing import cast

from chairlift.service.flag_kinds import ANY_TEXT, choice, integer, number
from chairlift.service.flags import Flag, FlagParser
from loadgen.cli.flags import add_flags
from loadgen.cli.values import DURATION, SHARE
from loadgen.errors import TargetError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.running import MockApi, mock_server
from loadgen.target.connection_errors import system_reason

_USUAL = MockBehaviour()


_FLAGS = (
    Flag("--api", "Chairlift's gRPC API or OpenAI-compatible HTTP", choice(("grpc", "openai")), default="grpc"),
    Flag("--host", "address to listen on", default="127.0.0.1"),
    Flag("--port", "port to listen on; 0 selects a free one", integer(0, 65535), default=50051),
)
_BEHAVIOUR = (
    ("model", ANY_TEXT, "model name to report"),
    ("ttft_s", DURATION, "time to first token"),
    ("itl_s", DURATION, "inter-token latency"),
    ("jitter", SHARE, "random share of each inter-token latency, up or down"),
    ("tokens_per_message", integer(1), "tokens per message after the first"),
    ("stall_s", DURATION, "duration of one stall of all answers"),
    ("stall_at_s", DURATION, "start of the stall, after the first request"),
    ("error_rate", SHARE, "share of requests that fail"),
    ("output_share", number(above=0, high=1, metavar="SHARE"), "share of the requested tokens that is sent"),
    ("cached_share", SHARE, "share of prompts reported as cached"),
    ("overhead_tokens", integer(0), "tokens added to text prompts"),
    ("max_model_len", integer(1), "context length to report"),
    ("vocab_size", integer(1), "vocabulary size to report"),
    ("seed", integer(0), "random seed of jitter and errors"),
)
"""Fields of MockBehaviour that have a flag: what values there are, and what the help says."""


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Serves answers without a model, with given latencies. DURATION: 50ms, 2s, or in seconds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_flags(parser, _FLAGS)
    for name, kind, what in _BEHAVIOUR:
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        add_flags(parser, [Flag(flag, what, kind, default=getattr(_USUAL, name))])
    return parser


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status."""
    behaviour = MockBehaviour(**{name: getattr(options, name.removesuffix("_s")) for name, _, _ in _BEHAVIOUR})
    asyncio.run(_serve(cast("MockApi", options.api), behaviour, options.host, options.port))
    return 0


async def _serve(api: MockApi, behaviour: MockBehaviour, host: str, port: int) -> None:
    over = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, over.set)
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
