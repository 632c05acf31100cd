"""The standard streams of a process whose starter closed some of them, as `>&-` and some supervisors do."""

import os
import sys


def open_closed_streams() -> None:
    """Opens the null device in place of each closed standard stream.

    Python has None in its place, so that printing and logging fail; and its descriptor would be that of the next
    connection, to which C libraries then print. Processes that this one starts inherit the devices, as they would
    inherit other streams. Call it before anything else opens a file.
    """
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:  # the lowest free descriptor is that of this stream
            descriptor = os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
