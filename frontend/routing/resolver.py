"""The addresses of engines, as they are given and as a name server knows them.

`dns:NAME:PORT`, and NAME:PORT for any name but localhost, stands for all addresses of the name, which may change: each
is an engine. Everything else (HOST:PORT with a number for a host, unix:PATH) is one engine, always.
"""

import asyncio
import ipaddress
import logging
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

logger = logging.getLogger(__name__)

_EVERY_S = 5.0
_EVERY_WHILE_NONE_S = 0.5
_MAX_MISSES = 3  # in a row, until an address has vanished: name servers rotate, lag and contradict each other
_SCHEME = "dns:"


def name_and_port(address: str) -> tuple[str, int] | None:
    """The name to be looked up and the port; None: the address is one engine's."""
    if address.startswith("unix:"):
        return None
    explicit = address.startswith(_SCHEME)
    host, _, port = address.removeprefix(_SCHEME).rpartition(":")
    host = host.strip("[]")
    if not explicit and (host == "localhost" or _is_number(host)):
        return None
    return host, int(port)


class Resolver:
    """Looks one name up again and again.

    A name that cannot be looked up keeps the addresses it had: engines do not vanish because a name server does.

    Args:
        name, port: of the engines.
        on_addresses: called with the addresses of late, sorted, whenever they have been looked up.
        is_serving: whether any engine serves; while none does, the name is looked up more often.
    """

    def __init__(
        self, name: str, port: int, on_addresses: Callable[[list[str]], None], is_serving: Callable[[], bool]
    ) -> None:
        self._name = name
        self._port = port
        self._on_addresses = on_addresses
        self._is_serving = is_serving
        self._complained = False
        self._hosts: dict[str, int] = {}  # and the answers in a row that were without it
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts looking it up. May be called again."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-resolver")

    async def stop(self) -> None:
        """Stops. May be called again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._look_up()
            pause_s = _EVERY_S if self._is_serving() else _EVERY_WHILE_NONE_S
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # not all frontends at once

    async def _look_up(self) -> None:
        try:
            named = await _in_thread(partial(_hosts_of, self._name, self._port))
        except (OSError, UnicodeError) as error:
            if not self._complained:
                logger.info("no address of %s: %s", self._name, error)
                self._complained = True
            return
        self._complained = False
        missed = {host: misses + 1 for host, misses in self._hosts.items() if host not in named}
        self._hosts = dict.fromkeys(named, 0) | {host: m for host, m in missed.items() if m < _MAX_MISSES}
        hosts = sorted(self._hosts)
        self._on_addresses([f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts])


async def _in_thread(look_up: Callable[[], set[str]]) -> set[str]:
    """Runs it on a thread that nobody waits for at the end, as for asyncio's own: a silent name server takes half a
    minute to give up.
    """
    found: Future[set[str]] = Future()
    found.set_running_or_notify_cancel()  # it cannot be cancelled: who does not wait any more just does not hear of it

    def run() -> None:
        try:
            found.set_result(look_up())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="engine-resolver", daemon=True).start()
    return await asyncio.wrap_future(found)


def _hosts_of(name: str, port: int) -> set[str]:
    return {str(info[4][0]) for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
