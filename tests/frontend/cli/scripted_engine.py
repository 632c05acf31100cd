"""A program that replaces the engine in tests of `chairlift up`.

The environment variable SCRIPTED_ENGINE names a folder. Its file `plan` has one line for each start, of which the last
also applies to all further starts:

    serve [SECONDS_PER_STEP]    serve
    hold                        serve, but only a step for each request that arrives until a file `go` exists
    die STATUS                  exit with this status

Each start appends its pid and arguments to the file `starts`, as a line of JSON.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

FOLDER = Path(os.environ["SCRIPTED_ENGINE"])


def end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


async def serve(step_interval_s: float, *, hold: bool) -> None:
    from tests.support.frontend.fake_engine import FakeEngine

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = FakeEngine(address=f"unix:{sys.argv[sys.argv.index('--uds') + 1]}", step_interval_s=step_interval_s)
    if hold:
        engine.pause()
    await engine.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.sendto(f"READY=1\nX_INSTANCE_ID={engine.instance_id}".encode(), os.environ["NOTIFY_SOCKET"])
    if hold:
        num_steps = 0
        while not (FOLDER / "go").exists():
            if num_steps < len(engine.submissions):
                num_steps = len(engine.submissions)
                await engine.step()
            await asyncio.sleep(0.01)
        engine.resume()
    await stop.wait()
    await engine.kill()


def main() -> None:
    with (FOLDER / "starts").open("a") as starts:
        starts.write(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:]}) + "\n")
    plan = (FOLDER / "plan").read_text().splitlines()
    num_starts = len((FOLDER / "starts").read_text().splitlines())
    action, _, value = plan[min(num_starts, len(plan)) - 1].partition(" ")
    if action == "die":
        sys.stderr.write("scripted engine: error: this is what must be changed\n")
        sys.exit(int(value))
    assert "--exit-on-stdin-close" in sys.argv
    threading.Thread(target=end_with_stdin, daemon=True).start()
    asyncio.run(serve(float(value or 0), hold=action == "hold"))


if __name__ == "__main__":
    main()
