"""`python -m engine.startup.follower`: runs one more rank of a divided model. Rank 0 starts it; it is not run by hand.

Its last argument is the number of a channel to rank 0, and its standard input a pipe that rank 0 holds open. On the
channel it gets an `Assignment`, answers None when its part is loaded, then gets one message per call of the runner: a
plan to launch, or COLLECT. Before it ends by itself it sends the EngineError that made it. It ends when the channel
does, and at once, whatever it waits for, when standard input does: then rank 0 is gone, however it died.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from chairlift.service.logs import log_to_stderr
from engine.errors import EngineError, StepError
from engine.parallel.plans import COLLECT, unpack_plan

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Follows rank 0 to its end; returns the exit status."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all: rank 0 decides what they mean
        signal.signal(signal_number, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank_0, name="stdin-watch", daemon=True).start()
    channel = Connection(int((sys.argv if argv is None else argv)[-1]))
    try:
        _follow(channel)
    except EOFError:
        return 0
    except EngineError as error:
        _tell(channel, error)
        return 1
    except Exception as error:
        _log.exception("defect")
        _tell(channel, StepError(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _follow(channel: Connection) -> None:
    """Does as told.

    Raises:
        EOFError: rank 0 needs it no longer.
        EngineError: it could not.
    """
    from engine.parallel.process_group import ProcessGroup
    from engine.startup.progress import Startup
    from engine.startup.rank import Assignment, build_rank, collective_timeout_s

    assignment = channel.recv()
    assert isinstance(assignment, Assignment)
    task = assignment.task
    level = "debug" if task.config.log_level == "debug" else "warning"
    log_to_stderr("chairlift-engine", level, task.config.log_format, rank=assignment.rank)
    group = ProcessGroup(assignment.rank, assignment.size, assignment.device)
    group.join(assignment.meeting_folder, collective_timeout_s(task.config))
    try:
        runner = build_rank(task, group, assignment.device, Startup(_log.debug)).runner
        channel.send(None)
        while True:
            message = channel.recv_bytes()
            if message == COLLECT:
                runner.collect()
            else:
                runner.launch(unpack_plan(message))
    except EOFError:
        group.leave()
        raise


def _end_with_rank_0() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(0)


def _tell(channel: Connection, error: EngineError) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        channel.send(error)


if __name__ == "__main__":
    sys.exit(main())
