"""Resolves host names of engines to addresses.

`dns:NAME:PORT`, and NAME:PORT for any name but localhost, stands for all addresses of the name, which may change; each
address is an engine. Everything else (HOST:PORT with an IP address, unix:PATH) is one engine.
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
_MAX_MISSES = 3  # answers in a row without an address that remove it; name servers rotate answers and lag behind
_SCHEME = "dns:"


def name_and_port(address: str) -> tuple[str, int] | None:
    """Returns the name to look up and the port; None if the address is a single engine."""
    if address.startswith("unix:"):
        return None
    explicit = address.startswith(_SCHEME)
    host, _, port = address.removeprefix(_SCHEME).rpartition(":")
    host = host.strip("[]")
    if not explicit and (host == "localhost" or _is_number(host)):
        return None
    return host, int(port)


class Resolver:
    """Looks up one name periodically. If a lookup fails, the name keeps its addresses.

    Args:
        name, port: name to look up, and the engines' port.
        on_addresses: called with the sorted addresses after every lookup.
        is_serving: returns whether any engine serves; if none does, lookups are more frequent.
    """

    def __init__(
        self, name: str, port: int, on_addresses: Callable[[list[str]], None], is_serving: Callable[[], bool]
    ) -> None:
        self._name = name
        self._port = port
        self._on_addresses = on_addresses
        self._is_serving = is_serving
        self._has_logged_failure = False
        self._hosts: dict[str, int] = {}  # answers in a row without the host, by host
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the lookups. May be called again."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-resolver")

    async def stop(self) -> None:
        """Stops the lookups. May be called again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._look_up()
            except Exception:  # no thread, say, or even a defect: the next lookup may succeed
                logger.exception("the lookup of %s failed", self._name)
            pause_s = _EVERY_S if self._is_serving() else _EVERY_WHILE_NONE_S
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # spreads the lookups of several frontends

    async def _look_up(self) -> None:
        try:
            named = await _in_thread(partial(_hosts_of, self._name, self._port))
        except (OSError, UnicodeError) as error:
            if not self._has_logged_failure:
                logger.info("no address of %s: %s", self._name, error)
                self._has_logged_failure = True
            return
        self._has_logged_failure = False
        missed = {host: misses + 1 for host, misses in self._hosts.items() if host not in named}
        self._hosts = dict.fromkeys(named, 0) | {host: m for host, m in missed.items() if m < _MAX_MISSES}
        hosts = sorted(self._hosts)
        self._on_addresses([f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts])


async def _in_thread(look_up: Callable[[], set[str]]) -> set[str]:
    """Runs a lookup on a daemon thread. asyncio's threads would delay the exit of the process for half a minute if the
    name server does not answer.
    """
    found: Future[set[str]] = Future()
    found.set_running_or_notify_cancel()  # a running lookup cannot be cancelled

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
