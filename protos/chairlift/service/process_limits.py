"""Checks that this process may have the threads and files it will need: C libraries crash without them."""

import contextlib
import resource
import threading

NUM_FILES = 64
NUM_THREADS = 24  # at least; those that compute come on top
MOST_FILES = 1 << 16  # of a server: not more, as libraries may walk over all that could be open


class ProcessLimitError(Exception):
    """The limits of this process are too low; the message says which, and how to raise it."""


def check_process_limits(num_threads: int = NUM_THREADS) -> None:
    """Starts threads for a millisecond or two and reads the limit on open files.

    Args:
        num_threads: threads to run beside those that exist.

    Raises:
        ProcessLimitError: the process may have fewer.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < NUM_FILES:
        raise ProcessLimitError(
            f"this process may open {allowed} files, it needs {NUM_FILES}: raise the limit (ulimit -n)"
        )
    num_started = _start_threads(num_threads)
    if num_started < num_threads:
        address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
        limits = "ulimit -u" if address_space == resource.RLIM_INFINITY else "ulimit -v for their stacks, ulimit -u"
        raise ProcessLimitError(
            f"this process may start {num_started} more threads, it needs {num_threads}: raise the limit ({limits}, "
            "or a container's pids limit)"
        )


def raise_file_limit() -> None:
    """Lets this process open as many files as the system allows it to ask for, up to `MOST_FILES`.

    Every connection is a file, and the usual soft limit of 1,024 is made for programs that call select().
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit below the one that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _start_threads(num_threads: int) -> int:
    """Number of threads that could run at once."""
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
