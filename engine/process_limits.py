"""Whether this process may have the threads and files that it will need: C libraries crash where they get none."""

import resource
import threading

from engine.errors import ConfigError

NUM_FILES = 64
NUM_THREADS = 24  # at least; those that compute come on top


def check_process_limits(num_threads: int = NUM_THREADS, num_files: int = NUM_FILES) -> None:
    """Tries it out, in a ms or two.

    Args:
        num_threads: that are to run beside those there are.
        num_files: that may be open at once, those there are included.
    Raises: ConfigError: fewer are allowed; says how many.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < num_files:
        raise ConfigError(f"this process may open {allowed} files, it needs {num_files}: raise the limit (ulimit -n)")
    num_started = _start_threads(num_threads)
    if num_started < num_threads:
        raise ConfigError(
            f"this process may start {num_started} more threads, it needs {num_threads}: raise the limit (ulimit -u, "
            "or a container's pids limit)"
        )


def _start_threads(num_threads: int) -> int:
    """How many of them can run at once."""
    over = threading.Event()
    threads = []
    try:
        for _ in range(num_threads):
            thread = threading.Thread(target=over.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError:  # cannot start new thread
        pass
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return len(threads)
