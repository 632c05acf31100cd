"""What can go wrong, by who can mend it.

LoadgenError            the command ends with one line and exit status 2
├── TraceError          a file of requests cannot be read, or a row cannot be trusted
├── OptionError         options contradict each other or a number is out of range
├── TargetError         the server cannot be reached or cannot be measured as asked
├── ResultError         results cannot be written or read
└── ComparisonError     two runs did not run the same workload
"""


class LoadgenError(Exception):
    """Something the user can mend; the text says what to do."""


class TraceError(LoadgenError):
    """A trace cannot be read; names the file, the row and what is wrong."""


class OptionError(LoadgenError):
    """Options contradict each other or a number is out of range; names them."""


class TargetError(LoadgenError):
    """The server cannot be reached or cannot be measured as asked."""


class ResultError(LoadgenError):
    """Results cannot be written or read back."""


class ComparisonError(LoadgenError):
    """Runs that cannot be compared."""
