"""Decides when an engine that ended is restarted, and how long requests may wait for that. Pure: times are arguments.

An engine that has served is restarted after the first pause: its start took longer than any pause, so this is no crash
loop. An engine that ends before it serves may never start: pauses double, and after `MAX_FAILED_STARTS` such ends in a
row requests no longer wait for a restart.
"""

import signal
from collections import deque

from frontend.routing.supervision import EngineEnd, SupervisorNote
from frontend.workers.child_process import RestartPauses

MAX_FAILED_STARTS = 3
"""Failed starts in a row. A kill from outside does not count: it says nothing about the next start."""

MAX_RESTART_S = 600.0
"""Longest time that requests wait for a restart, from the end of an engine that served. It bounds a start that hangs
and covers the load of large models.
"""

_NUM_ENDS_KEPT = 64


class RestartPolicy:
    """Follows the starts and ends of one engine.

    Args:
        first_pause_s: pause before the first restart; see RestartPauses.
    """

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._pauses = RestartPauses(first_pause_s)
        self._instance_id: str | None = None  # of the running engine, once it serves
        self._has_served = False
        self._num_failed_starts = 0
        self._restart_until_s = 0.0
        self._ends: deque[tuple[str, EngineEnd]] = deque(maxlen=_NUM_ENDS_KEPT)

    @property
    def note(self) -> SupervisorNote:
        """The state that frontends read."""
        return SupervisorNote(self._restart_until_s, dict(self._ends))

    def serves(self, instance_id: str, now_s: float) -> None:
        """Records that the started engine serves."""
        self._instance_id = instance_id
        self._has_served = True
        self._num_failed_starts = 0
        self._pauses = RestartPauses(self._first_pause_s)
        self._restart_until_s = min(self._restart_until_s, now_s)

    def ended(self, status: int, ran_s: float, now_s: float, *, was_out_of_memory: bool) -> float:
        """Records that the engine ended, or could not be started.

        Args:
            status: its return code, as in `subprocess`.
            ran_s: how long it ran.
            now_s: the present time.
            was_out_of_memory: whether the kernel killed processes for lack of memory meanwhile.

        Returns: the pause before the next start.
        """
        was_killed = status == -signal.SIGKILL and not was_out_of_memory
        if self._instance_id is not None:
            self._ends.append((self._instance_id, EngineEnd.KILLED if was_killed else EngineEnd.FAILED))
            self._instance_id = None
            self._restart_until_s = now_s + MAX_RESTART_S
        elif not was_killed and self._has_served:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                self.expect_nothing(now_s)
        return self._pauses.next_s(ran_s)

    def expect_nothing(self, now_s: float) -> None:
        """Records that no restart is expected any more."""
        self._restart_until_s = min(self._restart_until_s, now_s)
