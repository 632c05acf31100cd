"""Bare gRPC streams: the time and the CPU that grpc.aio itself takes.

The server sends its clock at a steady pace, or without a pause; the client subtracts. The server runs by
`python -m loadgen.experiments.wire.bare_hop --uds PATH`.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from loadgen.processes import start_module

_SERVICE, _METHOD = "chairlift.bench.Clock", "Tick"
_CONNECT_TIMEOUT_S = 60.0


class BareHop:
    """A server process and a channel to it for the length of a `with` block.

    Args:
        folder: for the socket and the log; must exist.
        period_s: seconds from one message of a stream to the next; 0 is no pause.
    """

    def __init__(self, folder: Path, *, period_s: float) -> None:
        self._path = folder / "hop.sock"
        self._log = folder / "hop.log"
        self._period_s = period_s

    def __enter__(self) -> Self:
        arguments = ("--uds", self._path, "--period-us", str(round(1e6 * self._period_s)))
        self._process = start_module("loadgen.experiments.wire.bare_hop", arguments, self._log)
        self._runner = asyncio.Runner()
        self._runner.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._channel.close())
        self._runner.close()
        self._process.stop()

    def latencies_ms(self, num_messages: int) -> list[float]:
        """Milliseconds from the server's write to the client's read, of each message."""
        return self._runner.run(self._receive(num_messages))

    def cpu_s_per_message(self, num_streams: int, num_messages: int) -> float:
        """CPU seconds of the server per message, with this many streams at once and messages on each."""
        before_s = self._process.cpu_s()
        self._runner.run(self._receive_all(num_streams, num_messages))
        return (self._process.cpu_s() - before_s) / (num_streams * num_messages)

    async def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix:{self._path}")
        self._tick: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            f"/{_SERVICE}/{_METHOD}"
        )

    async def _receive(self, num_messages: int) -> list[float]:
        call = self._tick(
            num_messages.to_bytes(8, sys.byteorder), wait_for_ready=True, timeout=_CONNECT_TIMEOUT_S + num_messages
        )
        return [(time.monotonic_ns() - int.from_bytes(message, sys.byteorder)) / 1e6 async for message in call]

    async def _receive_all(self, num_streams: int, num_messages: int) -> None:
        await asyncio.gather(*(self._receive(num_messages) for _ in range(num_streams)))


async def _serve(path: Path, period_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def tick(request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ARG001 - the signature is gRPC's
        for _ in range(int.from_bytes(request, sys.byteorder)):
            if period_s:
                await asyncio.sleep(period_s)
            yield time.monotonic_ns().to_bytes(8, sys.byteorder)

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(tick)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await stop.wait()
    await server.stop(None)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="bare-hop", description=__doc__)
    parser.add_argument("--uds", type=Path, required=True, help="socket to listen on")
    parser.add_argument("--period-us", type=int, required=True, help="from one message to the next; 0: no pauses")
    options = parser.parse_args(argv)
    asyncio.run(_serve(options.uds, options.period_us / 1e6))
    return 0


if __name__ == "__main__":
    sys.exit(main())
