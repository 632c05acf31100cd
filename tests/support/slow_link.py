"""Two hosts on this machine, as network namespaces, joined by a link with delay and loss that can be cut.

The link is a TUN device in each namespace and a thread that carries packets between them: kernels of containers often
have no netem. It needs root and /dev/net/tun.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_MAX_PACKET_BYTES = 65536
_NAMES = itertools.count()


def can_make_hosts() -> bool:
    """Whether this process may make namespaces and TUN devices."""
    if os.geteuid() != 0 or not _TUN.exists() or shutil.which("ip") is None:
        return False
    name = f"chair-probe-{os.getpid()}"
    try:
        os.close(_open_tun(f"probe{os.getpid() % 10000}"))
    except OSError:
        return False
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


class TwoHosts:
    """Two hosts and their link.

    Attributes:
        addresses: of each host.
        num_lost: packets that the link has lost.
    """

    addresses = ("10.77.31.1", "10.77.31.2")

    def __init__(self, delay_s: float, loss: float) -> None:
        """Args: delay_s: of each packet, in either direction. loss: share of the packets that are lost."""
        self._delay_s, self._loss = delay_s, loss
        self._rng = random.Random(1)
        self._is_cut = self._is_over = False
        self.num_lost = 0
        number = f"{os.getpid()}-{next(_NAMES)}"
        self._names = [f"chair-{number}-{index}" for index in range(2)]
        self._ends: list[int] = []
        for index, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            device = f"tun{os.getpid() % 10000}x{index}"
            self._ends.append(_open_tun(device))
            _run("ip", "link", "set", device, "netns", name)
            own, other = self.addresses[index], self.addresses[1 - index]
            for command in (
                ("ip", "addr", "add", own, "peer", other, "dev", device),
                ("ip", "link", "set", device, "up"),
                ("ip", "link", "set", "lo", "up"),
            ):
                _run(*self.prefix(index), *command)
        self._carrier = threading.Thread(target=self._carry, daemon=True)
        self._carrier.start()

    def prefix(self, index: int) -> tuple[str, ...]:
        """What a command begins with to run on a host."""
        return "ip", "netns", "exec", self._names[index]

    def cut(self) -> None:
        """Loses every packet from now on."""
        self._is_cut = True

    def close(self) -> None:
        """Removes the hosts; their processes must have ended."""
        self._is_over = True
        self._carrier.join()
        for end in self._ends:
            os.close(end)
        for name in self._names:
            _run("ip", "netns", "del", name)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # when, order, end, packet
        order = itertools.count()
        while not self._is_over:
            timeout_s = min(0.1, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.1
            for end in select.select(self._ends, [], [], timeout_s)[0]:
                packet = os.read(end, _MAX_PACKET_BYTES)
                if self._is_cut or self._rng.random() < self._loss:
                    self.num_lost += 1
                    continue
                other = self._ends[1 - self._ends.index(end)]
                heapq.heappush(waiting, (time.monotonic() + self._delay_s, next(order), other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # its queue is full: one more packet lost
                    os.write(end, packet)


@contextlib.contextmanager
def two_hosts(*, delay_s: float = 0.0, loss: float = 0.0) -> Iterator[TwoHosts]:
    """Makes two hosts, and removes them at the end of the block."""
    hosts = TwoHosts(delay_s, loss)
    try:
        yield hosts
    finally:
        hosts.close()


def _open_tun(device: str) -> int:
    end = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN_NO_PI))
    except OSError:
        os.close(end)
        raise
    return end


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
