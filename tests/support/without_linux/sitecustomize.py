"""Takes what only Linux has from a Python program: names of its interfaces, and its files of processes and devices.

A folder of its own, which comes first in PYTHONPATH.
"""

import mmap
import os
import resource
import socket
import sys
from typing import Any

HIDDEN = ("/proc", "/sys")

for module, names in {
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK", "MAP_POPULATE"),
    os: (
        "copy_file_range", "eventfd", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate",
        "sched_getaffinity", "sched_setaffinity", "splice",
    ),
    resource: ("prlimit",),
    socket: ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_USER_TIMEOUT", "SO_PEERCRED", "SO_BINDTODEVICE"),
}.items():  # fmt: skip
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
del os.sysconf_names["SC_AVPHYS_PAGES"]


def hides(path: object) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(HIDDEN)


def hide(event: str, arguments: tuple[object, ...]) -> None:
    if event in {"open", "os.listdir", "os.scandir"} and hides(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


real_stat = os.stat


def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
    if hides(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    return real_stat(path, *arguments, **options)


os.stat = stat
sys.addaudithook(hide)
