"""What `chairlift-loadgen` ends with, whatever the verb."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """0 is done."""

    FAILED = 2
    """A wrong flag, file or server; one line has said what to do."""
    INVALID = 3
    """`--strict`, and a run may not be quoted."""
    INTERRUPTED = 130
    """Ctrl-C; what there was has been reported."""
