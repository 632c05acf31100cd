"""The ranks of a machine without rank 0: it serves no requests, and passes plans on to its ranks."""

import contextlib
import logging
import threading
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import EngineError, StepError
from engine.parallel.followers import SETTLE_S, Followers, OnFailure
from engine.parallel.nodes import NodeLink
from engine.parallel.plans import LEAVE
from engine.parallel.remote_node import READY, STOPPING, error_report
from engine.startup.device import check_device, choose_device, set_threads
from engine.startup.progress import StartupProgress
from engine.startup.rank_group import assignments
from engine.startup.rank_task import make_task
from engine.startup.rendezvous import join_group
from engine.startup.served_model import find_model, open_model

_log = logging.getLogger(__name__)


class Node:
    """The ranks of this machine, in a group whose rank 0 is on another one.

    `drain` and `stop` may be called from a signal handler.
    """

    def __init__(self, link: NodeLink, followers: Followers, lost: threading.Event) -> None:
        """Takes the connection to node 0, the ranks of this machine, which are loading, and what is set when node 0 has
        gone.
        """
        self._link = link
        self._followers = followers
        self._lost = lost
        self._is_stopped = False

    def run(self) -> None:
        """Passes plans on until node 0 lets the ranks leave, or `stop`.

        Raises: StepError: node 0 has gone.
        """
        threading.Thread(target=self._report_ready, name="ranks-ready", daemon=True).start()
        try:
            while (message := self._link.recv_bytes()) != LEAVE:
                with contextlib.suppress(OSError):  # a rank has ended, which its monitor reports
                    self._followers.send(message)
        except (EOFError, OSError):
            self._lost.set()
            if not self._is_stopped:
                raise StepError(f"{self._link.name} has ended, or cannot be reached any more") from None
        finally:
            self._followers.close()
            self._link.close()

    def drain(self, grace_s: float) -> None:  # noqa: ARG002 - node 0 has its own
        """Asks node 0 to drain: it decides when the ranks leave, within its own grace period."""
        _log.info("asking node 0 to drain; another signal ends this machine's ranks at once")
        with contextlib.suppress(OSError):  # it has gone: `run` notices
            self._link.send_bytes(STOPPING)

    def stop(self) -> None:
        """Makes `run` return now, which ends the whole group."""
        self._is_stopped = True
        self._link.shut_down()

    def _report_ready(self) -> None:
        self._followers.wait_ready(is_timed=False)  # node 0 times it, once it has loaded itself
        _log.info("the ranks of this machine are ready")
        with contextlib.suppress(OSError):
            self._link.send_bytes(READY)


def on_rank_failure(link: NodeLink, lost: threading.Event, end: Callable[[EngineError], None]) -> OnFailure:
    """Returns what handles an error of a rank here: tells node 0, and ends this process.

    If node 0 has gone, ranks here fail too: `Node.run` reports that, and this handler does nothing. Therefore it waits
    first, but less than node 0 waits for the cause of a failed step: the report makes node 0 exit.

    Args:
        link: the connection to node 0.
        lost: is set when it has gone.
        end: see `start_node`.
    """

    def report_and_end(error: EngineError) -> None:
        if lost.wait(SETTLE_S / 2):
            return
        with contextlib.suppress(OSError):
            link.send_bytes(error_report(error))
        end(error)

    return report_and_end


def start_node(config: EngineConfig, startup: StartupProgress, end: Callable[[EngineError], None]) -> Node:
    """Joins the group and starts this machine's ranks.

    Args:
        config: with a `node_rank` above 0.
        startup: reports the progress.
        end: ends this process because of an error, called on another thread.
    Raises: CheckpointError, ConfigError: the model's files, a flag or the memory, or node 0 refuses this machine.
    """
    layout, device = config.layout, choose_device(config)
    check_device(config, device)
    num_threads = set_threads(config, device)
    startup.begin("model", f"finding model {config.model_name}")
    model_dir = find_model(config, startup)
    task = make_task(config, device, model_dir, open_model(model_dir, config, device), num_threads)
    link, meeting = join_group(task, startup)

    lost = threading.Event()
    ranks = layout.ranks_of(config.node_rank)
    name = f"node {config.node_rank}"
    followers = Followers(
        ranks, timeout_s=config.rank_timeout_s, on_failure=on_rank_failure(link, lost, end), owner=name
    )
    startup.begin("ranks", f"starting ranks {', '.join(map(str, ranks))} of {layout.num_ranks}")
    followers.assign(assignments(ranks, device, meeting, task))
    return Node(link, followers, lost)
