"""Priority of threads that work beside the step loop."""

import os
import sys
import threading

_NICENESS = 10  # added to the engine's own: during a step, such a thread gets a tenth of a core


def lower_priority() -> None:
    """Lowers the priority of this thread, on systems with thread priorities."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
