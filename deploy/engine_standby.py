"""Runs an engine until another one serves at some address, then drains it and stands by.

    engine_standby.py HOST:PORT COMMAND...

Compose always starts services without a profile: under `--profile gpu` the CPU engine starts beside the GPU engine, in
any order, and has to drain for it. It drains only after the other one has loaded, as grpc.health.v1 reports, because
loading may take longer than requests wait for an engine. Then it idles until the container ends, because its exit would
count as a failure.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

WATCH_S = 3.0
TIMEOUT_S = 3.0


def main(argv: Sequence[str], *, watch_s: float = WATCH_S) -> int:
    """Returns the exit status of the command, or 0 after standing by."""
    address, *command = argv
    must_end = False
    engine: subprocess.Popen[bytes] | None = None

    def end(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature is fixed
        nonlocal must_end
        must_end = True
        if engine is not None:
            engine.send_signal(signal_number)

    signals, wakeup = socket.socketpair()  # whichever thread gets a signal; this one may be waiting then
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, end)
    if not _serves(address) and not must_end:
        engine = subprocess.Popen(command)
        if must_end:  # the signal came while the engine was being started: `end` could not pass it on
            engine.terminate()
        while True:
            try:
                return _exit_status(engine.wait(watch_s))
            except subprocess.TimeoutExpired:
                if must_end or not _serves(address):
                    continue
            engine.terminate()
            engine.wait()
            break
    if not must_end:
        print(f"an engine serves at {address}: this one stands by", flush=True)
    while not must_end:
        signals.recv(1)
    return 0


def _exit_status(return_code: int) -> int:
    if return_code == -signal.SIGKILL:  # the engine itself cannot log this
        print(
            "the engine was killed; probably it needed more memory than ENGINE_MEMORY allows",
            flush=True,
        )
    return 128 - return_code if return_code < 0 else return_code


def _serves(address: str) -> bool:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:  # the name is unknown, as without the profile, or no server listens yet
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
