"""Connections between the machines (nodes) of a group, over which node 0 sends plans to the others.

Node 0 listens; every other node connects, says who it is and what it was started with, and is accepted or refused. When
all are there, each gets node 0's first message. Messages are bytes with a length before them, in the handshake JSON.
Connections are neither encrypted nor authenticated, like those of gloo and NCCL: they need an isolated network.
"""

import contextlib
import json
import logging
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError

_PROTOCOL = "chairlift-nodes 1"
_LENGTH = struct.Struct("!Q")
_MAX_HELLO_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 30  # a length above it was sent by another program
_HELLO_TIMEOUT_S = 5.0  # for a connection to say who it is
_TICK_S = 0.5  # between two attempts to connect, and two reports of progress
_MAX_DIFFERENCES = 3  # named in a refusal
_NO_ENGINE = "it is no engine of this version"

# A machine that vanishes without a word is noticed after about 15 s: idle 5 s, 5 probes 2 s apart.
_SOCKET_OPTIONS = {
    "SOL_SOCKET": {"SO_KEEPALIVE": 1},
    "IPPROTO_TCP": {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": 5,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": 5,
        "TCP_USER_TIMEOUT": 15_000,
    },
}

OnWait = Callable[[str], None]

_log = logging.getLogger(__name__)


class ForeignPeerError(OSError):
    """The other end is no engine."""


class NodeLink:
    """One end of a connection between two nodes.

    Attributes:
        name: of the other end, for messages.
        local_host, peer_host: addresses of both ends.
    """

    def __init__(self, connected: socket.socket, node: int) -> None:
        """Takes a connected socket, and the number of the other node."""
        self._socket = connected
        for level, options in _SOCKET_OPTIONS.items():
            for option, value in options.items():
                if hasattr(socket, option):
                    connected.setsockopt(getattr(socket, level), getattr(socket, option), value)
        connected.settimeout(None)
        self.local_host: str = connected.getsockname()[0]
        self.peer_host: str = connected.getpeername()[0]
        self.name = f"node {node} ({self.peer_host})"

    def fileno(self) -> int:
        """The socket's file descriptor, to wait for a message."""
        return self._socket.fileno()

    def send_bytes(self, message: bytes) -> None:
        """Sends a message. Raises: OSError: the other end is gone."""
        self._socket.sendall(_framed(message))

    def recv_bytes(self) -> bytes:
        """Waits for a message.

        Raises: EOFError: the other end closed the connection. OSError: it cannot be reached any more.
            ForeignPeerError: it is no engine.
        """
        num_bytes = _LENGTH.unpack(self._read(_LENGTH.size))[0]
        if num_bytes > _MAX_MESSAGE_BYTES:
            raise ForeignPeerError
        return self._read(num_bytes)

    def shut_down(self) -> None:
        """Ends the connection in both directions; a thread that waits for a message gets an EOFError."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def is_closed_by_peer(self) -> bool:
        """Whether the other end is gone; does not wait, and reads no message."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            num_read = self._socket.recv_into(view)
            if not num_read:
                raise EOFError
            view = view[num_read:]
        return bytes(data)


@dataclass(slots=True)
class _Arrival:
    """A connection that has not said yet who it is."""

    until_s: float
    data: bytearray = field(default_factory=bytearray)

    def hello(self) -> bytes | None:
        """Returns what it has said; None: not all of it has arrived. Raises: ValueError: it is no hello."""
        if len(self.data) < _LENGTH.size:
            return None
        num_bytes = _LENGTH.unpack_from(self.data)[0]
        if num_bytes > _MAX_HELLO_BYTES:
            raise ValueError
        return bytes(self.data[_LENGTH.size :]) if len(self.data) >= _LENGTH.size + num_bytes else None


class NodeListener:
    """Node 0, where the other nodes arrive.

    Attributes:
        host: the address that it listens on.
    """

    def __init__(self, address: str, num_nodes: int, facts: Mapping[str, str]) -> None:
        """Opens the port.

        Args:
            address: HOST:PORT.
            num_nodes: with this one.
            facts: what must be equal on all nodes, such as flags: name -> value.
        Raises: ConfigError: the address cannot be listened on.
        """
        self._address, self._num_nodes, self._facts = address, num_nodes, dict(facts)
        self._links: dict[int, NodeLink] = {}
        self._welcomed: set[NodeLink] = set()
        self._arrivals: dict[socket.socket, _Arrival] = {}
        self._last_refusal = ""
        try:
            self._socket = socket.create_server(_split(address), family=_resolve(address)[0][0])
            self.host: str = self._socket.getsockname()[0]
        except OSError as error:
            raise ConfigError(f"--master-addr {address}: cannot listen there: {error.strerror or error}") from error

    def accept_all(self, first_message: Callable[[], bytes], timeout_s: float, on_wait: OnWait) -> list[NodeLink]:
        """Waits for all other nodes, and sends each the first message.

        Args:
            first_message: returns what is sent to each; called once, when all are there.
            timeout_s: for all of them to come.
            on_wait: called with what is waited for, twice a second.
        Returns: their connections, node 1 first.
        Raises: ConfigError: nodes are missing after the timeout.
        """
        until_s, message = time.monotonic() + timeout_s, b""
        with self._socket:
            try:
                while missing := self._missing():
                    if time.monotonic() > until_s:
                        last = f"; the last one refused: {self._last_refusal}" if self._last_refusal else ""
                        raise ConfigError(f"{missing} has not come to {self._address} within {timeout_s:g} s{last}")
                    on_wait(f"waiting for {missing} at {self._address}")
                    self._turn(min(_TICK_S, max(0.0, until_s - time.monotonic())))
                    if not self._missing():
                        message = message or first_message()
                        self._welcome(message)
            except BaseException:
                for link in self._links.values():
                    link.close()
                raise
            finally:
                for arrival in self._arrivals:
                    arrival.close()
        return [self._links[node] for node in range(1, self._num_nodes)]

    def _missing(self) -> str:
        nodes = [str(node) for node in range(1, self._num_nodes) if node not in self._links]
        return f"node {', '.join(nodes)} of {self._num_nodes}" if nodes else ""

    def _turn(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            sources: list[socket.socket | NodeLink] = [self._socket, *self._arrivals, *self._links.values()]
            for source in sources:
                selector.register(source, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        if self._socket in ready:
            with contextlib.suppress(OSError):  # it has left already
                arrived, _ = self._socket.accept()
                arrived.setblocking(False)
                self._arrivals[arrived] = _Arrival(time.monotonic() + _HELLO_TIMEOUT_S)
        for arrived in [source for source in self._arrivals if source in ready]:
            self._read_hello(arrived)
        for arrived, arrival in list(self._arrivals.items()):
            if time.monotonic() > arrival.until_s:
                self._drop(arrived, "it did not say who it is")
        for node, link in list(self._links.items()):
            if link in ready and link.is_closed_by_peer():
                _log.warning("%s has left before all were there", link.name)
                self._links.pop(node).close()

    def _read_hello(self, arrived: socket.socket) -> None:
        arrival = self._arrivals[arrived]
        try:
            data = arrived.recv(_MAX_HELLO_BYTES)
            arrival.data += data
            if (hello := arrival.hello()) is None:
                if not data:
                    self._drop(arrived, "it left without a word")
                return
            self._judge(arrived, json.loads(hello))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._drop(arrived, _NO_ENGINE)

    def _judge(self, arrived: socket.socket, hello: Mapping[str, Any]) -> None:
        node, facts = hello["node"], {str(name): str(value) for name, value in hello["facts"].items()}
        reason = ""
        if hello["protocol"] != _PROTOCOL or type(node) is not int:
            raise ValueError
        if hello["nodes"] != self._num_nodes:
            reason = f"node {node} was started with --nnodes {hello['nodes']}, node 0 with {self._num_nodes}"
        elif not 0 < node < self._num_nodes:
            reason = f"--node-rank {node} is not one of 1 to {self._num_nodes - 1}"
        elif node in self._links and not self._links[node].is_closed_by_peer():
            reason = f"there is a node {node} already, {self._links[node].name}"
        elif differences := _differences(node, facts, self._facts):
            reason = differences
        if reason:
            with contextlib.suppress(OSError):
                arrived.sendall(_framed(json.dumps({"refused": reason}).encode()))
            self._drop(arrived, reason)
            return
        link = NodeLink(arrived, node)
        del self._arrivals[arrived]
        if node in self._links:
            self._links.pop(node).close()
        self._links[node] = link
        _log.info("%s has come", self._links[node].name)

    def _drop(self, arrived: socket.socket, reason: str) -> None:
        del self._arrivals[arrived]
        with contextlib.suppress(OSError):
            self._last_refusal = f"{arrived.getpeername()[0]}: {reason}"
            _log.warning("refused a connection from %s", self._last_refusal)
        arrived.close()

    def _welcome(self, message: bytes) -> None:
        """Sends the first message to those that do not have it: one that left may have come again."""
        for node, link in list(self._links.items()):
            if link in self._welcomed:
                continue
            try:
                link.send_bytes(message)
                self._welcomed.add(link)
            except OSError:
                self._links.pop(node).close()


def join_nodes(
    address: str,
    node: int,
    num_nodes: int,
    facts: Mapping[str, str],
    timeout_s: float,
    on_wait: OnWait,
) -> tuple[NodeLink, bytes]:
    """Joins node 0, and waits until all other nodes have.

    Args:
        address: where node 0 listens; it may start later.
        node: number of this node.
        num_nodes, facts, timeout_s, on_wait: as of `NodeListener`.
    Returns: the connection, and node 0's first message.
    Raises: ConfigError: node 0 cannot be reached within the timeout, or refuses this node.
    """
    until_s = time.monotonic() + timeout_s
    hello = {"protocol": _PROTOCOL, "node": node, "nodes": num_nodes, "facts": dict(facts)}
    reason = ""
    for _ in _attempts(until_s):
        on_wait(f"connecting to node 0 at {address}{reason and f' ({reason})'}")
        try:
            connected = socket.create_connection(_split(address), timeout=max(_TICK_S, until_s - time.monotonic()))
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        try:
            link = NodeLink(connected, 0)
            link.send_bytes(json.dumps(hello).encode())
            connected.settimeout(max(_TICK_S, until_s - time.monotonic()))
            on_wait("waiting for the other nodes")
            message = link.recv_bytes()
            connected.settimeout(None)
        except (EOFError, OSError) as error:
            connected.close()
            match error:
                case TimeoutError():
                    reason = "it timed out"
                case ForeignPeerError():
                    reason = _NO_ENGINE
                case _:
                    reason = "it has left"
            continue
        if message.startswith(b'{"refused":'):
            link.close()
            raise ConfigError(json.loads(message)["refused"])
        return link, message
    raise ConfigError(f"--master-addr {address}: node 0 has not taken in node {node} within {timeout_s:g} s: {reason}")


def free_port(host: str) -> int:
    """Returns a port that is free now at an address of this machine."""
    family, kind, _, _, place = _resolve(f"[{host}]:0" if ":" in host else f"{host}:0")[0]
    with socket.socket(family, kind) as probe:
        probe.bind(place)
        return int(probe.getsockname()[1])


def _attempts(until_s: float) -> Iterator[None]:
    yield
    while time.monotonic() < until_s:
        time.sleep(min(_TICK_S, max(0.0, until_s - time.monotonic())))
        yield


def _differences(node: int, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Returns what differs, one line; empty: nothing."""
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    if not names:
        return ""
    texts = [f"{name} is {theirs.get(name, 'unknown')}, there {ours.get(name, 'unknown')}" for name in names]
    more = f"; and {len(names) - _MAX_DIFFERENCES} more" if len(names) > _MAX_DIFFERENCES else ""
    return f"node {node} differs from node 0: {'; '.join(texts[:_MAX_DIFFERENCES])}{more}"


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _resolve(address: str) -> list[Any]:
    host, port = _split(address)
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
