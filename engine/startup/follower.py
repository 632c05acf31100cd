"""`python -m engine.startup.follower`: runs one more rank of a divided model. Rank 0 starts it; it is not run by hand.

The last argument is the file descriptor of a channel to rank 0; standard input is a pipe that rank 0 holds open. The
channel carries an `Assignment`, then None from the follower when its shard is loaded, then one message per call of the
runner: a plan to launch, or COLLECT. If the follower fails, it sends the EngineError first. That of an internal error
has the traceback as a note: rank 0 logs it unless the failure is a consequence of another. The follower exits when the
channel closes, and immediately when standard input closes, because rank 0 has then ended.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from chairlift.service.logs import log_to_stderr
from engine.errors import EngineError, StepError
from engine.parallel.plans import COLLECT, unpack_plan

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the follower until rank 0 closes the channel; returns the exit status."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all ranks; rank 0 handles them
        signal.signal(signal_number, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank_0, name="stdin-watch", daemon=True).start()
    channel = Connection(int((sys.argv if argv is None else argv)[-1]))
    try:
        _follow(channel)
    except EOFError:
        return 0
    except EngineError as error:
        _send_error(channel, error)
        return 1
    except Exception as error:
        internal = StepError(f"{type(error).__name__}: {error}")
        internal.add_note(f"internal error:\n{traceback.format_exc()}")
        _send_error(channel, internal)
        return 1
    return 0


def _follow(channel: Connection) -> None:
    """Loads the shard of the assignment and runs the plans from rank 0.

    Raises:
        EOFError: rank 0 closed the channel.
        EngineError: loading or a step failed.
    """
    from engine.parallel.process_group import ProcessGroup
    from engine.startup.progress import StartupProgress
    from engine.startup.rank import build_rank
    from engine.startup.rank_group import Assignment, collective_timeout_s

    assignment = channel.recv()
    assert isinstance(assignment, Assignment)
    task = assignment.task
    level = "debug" if task.config.log_level == "debug" else "warning"
    log_to_stderr("chairlift-engine", level, task.config.log_format, rank=assignment.rank)
    group = ProcessGroup(assignment.rank, task.config.layout, assignment.device)
    if assignment.device.type == "cpu" and not task.config.uses_torch_kernels("cpu"):
        from engine.startup.cpu_threads import set_threads  # and with it numba

        set_threads(task.num_threads)
    group.join(assignment.meeting, collective_timeout_s(task.config))
    try:
        runner = build_rank(task, group, assignment.device, StartupProgress(_log.debug)).runner
        group.before_leaving = runner.close
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


def _send_error(channel: Connection, error: EngineError) -> None:
    with contextlib.suppress(OSError):  # rank 0 may have ended
        channel.send(error)


if __name__ == "__main__":
    sys.exit(main())
