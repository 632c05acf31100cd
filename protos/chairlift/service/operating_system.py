"""Which operating systems the servers run on: others lack the calls that they need."""

import sys


class UnsupportedSystemError(Exception):
    """The servers do not run on this operating system; the message says what to do instead."""


def check_operating_system() -> None:
    """Raises UnsupportedSystemError if this is not Linux."""
    if sys.platform != "linux":
        raise UnsupportedSystemError(
            f"Chairlift's servers run on Linux, this is {sys.platform}: start them in containers, with `docker compose "
            "up` (clients run anywhere)"
        )
