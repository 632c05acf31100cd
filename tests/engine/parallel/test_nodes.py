"""Machines of a group meet: in any order, with equal facts, in spite of strangers, and not for ever."""

import errno
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from engine.errors import ConfigError, StepError
from engine.parallel.nodes import NodeLink, NodeListener, free_port, join_nodes
from engine.startup.node import Node, on_rank_failure
from tests.hang import HANG_S

FACTS = {"--max-num-seqs": "64", "the version": "1"}
GO = b'{"port": 7}'

Joined = tuple[NodeLink, bytes]


class Meeting:
    """Node 0 in a thread, and a pool for the others."""

    def __init__(self, num_nodes: int, timeout_s: float = HANG_S, host: str = "127.0.0.1") -> None:
        self.port = free_port(host)
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.num_nodes = num_nodes
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(8)
        self.waits: list[str] = []
        self.links: Future[list[NodeLink]] = Future()

    def listen(self) -> None:
        listener = NodeListener(self.address, self.num_nodes, FACTS)
        self.links = self._pool.submit(listener.accept_all, lambda: GO, self._timeout_s, self.waits.append)

    def join(
        self,
        node: int,
        facts: dict[str, str] | None = None,
        *,
        num_nodes: int | None = None,
        timeout_s: float = HANG_S,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> "Future[Joined]":
        numbers = node, self.num_nodes if num_nodes is None else num_nodes
        return self._pool.submit(join_nodes, self.address, *numbers, facts or FACTS, timeout_s, on_wait)

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)


@pytest.fixture
def meet() -> Iterator[Callable[..., Meeting]]:
    meetings: list[Meeting] = []

    def make(*arguments: object, **options: object) -> Meeting:
        meetings.append(Meeting(*arguments, **options))  # type: ignore[arg-type]
        return meetings[-1]

    yield make
    for meeting in meetings:
        meeting._pool.shutdown()


@contextmanager
def ends(first: NodeLink, second: NodeLink) -> Iterator[None]:
    try:
        yield
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_meet_in_any_order_and_are_told_at_once(meet: Callable[..., Meeting], order: tuple[int, ...]) -> None:
    meeting = meet(3)
    joined = {}
    for node in order:
        if node == 0:
            meeting.listen()
        else:
            joined[node] = meeting.join(node)
    links = meeting.links.result(HANG_S)
    assert [link.name for link in links] == ["node 1 (127.0.0.1)", "node 2 (127.0.0.1)"]
    for node, link in enumerate(links, start=1):
        theirs, message = joined[node].result(HANG_S)
        assert message == GO
        assert (theirs.name, theirs.peer_host, theirs.local_host) == ("node 0 (127.0.0.1)", "127.0.0.1", "127.0.0.1")
        with ends(link, theirs):
            link.send_bytes(b"plan")
            assert theirs.recv_bytes() == b"plan"


def test_messages_arrive_whole_and_in_order(meet: Callable[..., Meeting]) -> None:
    meeting = meet(2)
    meeting.listen()
    theirs, _ = meeting.join(1).result(HANG_S)
    (link,) = meeting.links.result(HANG_S)
    messages = [b"", b"x" * 10_000_000, *(str(i).encode() for i in range(1000))]
    with ends(link, theirs):
        sender = threading.Thread(target=lambda: [link.send_bytes(message) for message in messages])
        sender.start()
        assert all(theirs.recv_bytes() == message for message in messages)
        sender.join()


def test_the_end_of_one_end_is_the_end_of_the_other(meet: Callable[..., Meeting]) -> None:
    meeting = meet(2)
    meeting.listen()
    theirs, _ = meeting.join(1).result(HANG_S)
    (link,) = meeting.links.result(HANG_S)
    link.send_bytes(b"last")
    link.close()
    assert theirs.recv_bytes() == b"last"
    with pytest.raises(EOFError):
        theirs.recv_bytes()
    theirs.close()


@pytest.mark.parametrize(
    ("facts", "num_nodes", "node", "words"),
    [
        (FACTS | {"--max-num-seqs": "8"}, 2, 1, "node 1 differs from node 0: --max-num-seqs is 8, there 64"),
        ({"the version": "1"}, 2, 1, "--max-num-seqs is unknown, there 64"),
        (FACTS | {"a": "1", "b": "2", "c": "3", "d": "4"}, 2, 1, "c is 3, there unknown; and 1 more"),
        (FACTS, 3, 1, "node 1 was started with --nnodes 3, node 0 with 2"),
        (FACTS, 2, 2, "--node-rank 2 is not one of 1 to 1"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_one_line_on_both(
    meet: Callable[..., Meeting],
    facts: dict[str, str],
    num_nodes: int,
    node: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    meeting = meet(2)
    meeting.listen()
    with pytest.raises(ConfigError) as refusal:
        meeting.join(node, facts, num_nodes=num_nodes).result(HANG_S)
    assert words in str(refusal.value)
    fitting = meeting.join(1)
    with ends(*meeting.links.result(HANG_S), fitting.result(HANG_S)[0]):
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert words in warning.getMessage()


def test_a_second_node_of_the_same_rank_is_refused(meet: Callable[..., Meeting]) -> None:
    meeting = meet(3)
    meeting.listen()
    arrived = threading.Event()
    first = meeting.join(1, on_wait=lambda text: arrived.set() if text == "waiting for the other nodes" else None)
    assert arrived.wait(HANG_S)
    with pytest.raises(ConfigError, match="there is a node 1 already, node 1"):
        meeting.join(1).result(HANG_S)
    second = meeting.join(2)
    links = meeting.links.result(HANG_S)
    for end in (*links, first.result(HANG_S)[0], second.result(HANG_S)[0]):
        end.close()


def test_a_node_that_dies_before_all_are_there_may_come_again(meet: Callable[..., Meeting]) -> None:
    meeting = meet(3)
    meeting.listen()
    with meeting.stranger() as dying:
        hello = {"protocol": "chairlift-nodes 1", "node": 1, "nodes": 3, "facts": FACTS}
        data = json.dumps(hello).encode()
        dying.sendall(struct.pack("!Q", len(data)) + data)
    joined = [meeting.join(2), meeting.join(1)]
    links = meeting.links.result(HANG_S)
    for end in (*links, *(each.result(HANG_S)[0] for each in joined)):
        end.close()


def test_a_node_that_resets_its_connection_keeps_nobody_out(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system knows no address of the other end then."""
    take, resets = NodeLink.__init__, [1]

    def take_or_fail(link: NodeLink, connected: socket.socket, node: int) -> None:
        if node in resets:  # that of node 0; the other end is node 0's link
            resets.remove(node)
            raise OSError("Transport endpoint is not connected")
        take(link, connected, node)

    monkeypatch.setattr(NodeLink, "__init__", take_or_fail)
    monkeypatch.setattr("engine.parallel.nodes._TICK_S", 0.01)
    meeting = meet(2)
    meeting.listen()
    with ends(meeting.join(1).result(HANG_S)[0], *meeting.links.result(HANG_S)):
        assert resets == []


def test_a_node_that_leaves_at_the_last_moment_comes_again_and_the_others_hear_once(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failures = NodeLink.send_bytes, ["node 2 (127.0.0.1)"]

    def send_or_fail(link: NodeLink, message: bytes) -> None:
        if message == GO and link.name in failures:
            failures.remove(link.name)
            raise BrokenPipeError
        send(link, message)

    monkeypatch.setattr(NodeLink, "send_bytes", send_or_fail)
    monkeypatch.setattr("engine.parallel.nodes._TICK_S", 0.01)
    meeting = meet(3)
    meeting.listen()
    joined = [meeting.join(node) for node in (1, 2)]
    links = meeting.links.result(HANG_S)
    for link, each in zip(links, joined, strict=True):
        theirs, message = each.result(HANG_S)
        assert message == GO
        with ends(link, theirs):
            link.send_bytes(b"plan")
            assert theirs.recv_bytes() == b"plan"
    assert failures == []


def test_another_server_at_the_address_of_node_0_is_named_as_such(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.parallel.nodes._TICK_S", 0.01)
    meeting = meet(2)
    with socket.create_server(("127.0.0.1", meeting.port)) as server:
        joining = meeting.join(1, timeout_s=0.3)
        while not joining.done():
            server.settimeout(0.05)
            try:
                connected, _ = server.accept()
            except TimeoutError:
                continue
            with connected:
                connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(ConfigError, match=r"node 1 within 0\.3 s: it is no engine of this version"):
            joining.result(HANG_S)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 100,
        struct.pack("!Q", 4) + b"null",
        struct.pack("!Q", 2) + b"{}",
        struct.pack("!Q", 1 << 40),
        struct.pack("!Q", 60000) + b"x" * 60000,
        struct.pack("!Q", 60000) + b"[" * 60000,
        b"",
    ],
    ids=["HTTP", "garbage", "null", "nothing said", "too long", "no JSON", "deep JSON", "silence"],
)
def test_strangers_keep_nobody_out(meet: Callable[..., Meeting], words: bytes) -> None:
    meeting = meet(2)
    meeting.listen()
    with meeting.stranger() as stranger:
        stranger.sendall(words)
        theirs, _ = meeting.join(1).result(HANG_S)
        theirs.close()
        for link in meeting.links.result(HANG_S):
            link.close()


def test_a_node_that_never_comes_is_named(meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.nodes._TICK_S", 0.01)
    meeting = meet(3, timeout_s=0.3)
    meeting.listen()
    waiting = meeting.join(2, timeout_s=0.6)
    with pytest.raises(ConfigError, match=rf"node 1 of 3 has not come to {meeting.address} within 0.3 s"):
        meeting.links.result(HANG_S)
    with pytest.raises(ConfigError, match=r"node 0 has not taken in node 2 within 0\.6 s"):
        waiting.result(HANG_S)
    assert any(text == f"waiting for node 1 of 3 at {meeting.address}" for text in meeting.waits)


def test_node_0_that_never_comes_is_named(meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.nodes._TICK_S", 0.01)
    meeting = meet(2)
    with pytest.raises(ConfigError, match=rf"--master-addr {meeting.address}: .* within 0.05 s: Connection refused"):
        meeting.join(1, timeout_s=0.05).result(HANG_S)


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--master-addr 192\.0\.2\.1:29500: cannot listen there"):
        NodeListener("192.0.2.1:29500", 2, FACTS)


def test_ipv6(meet: Callable[..., Meeting]) -> None:
    try:
        meeting = meet(2, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    meeting.listen()
    theirs, message = meeting.join(1).result(HANG_S)
    assert (theirs.peer_host, message) == ("::1", GO)
    theirs.close()
    for link in meeting.links.result(HANG_S):
        link.close()


def test_a_connection_that_is_reset_at_once_is_tried_again(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between connecting and asking for the peer's address, the peer may have gone."""
    arrived: list[socket.socket] = []

    class ResetAtFirst(NodeLink):
        def __init__(self, connected: socket.socket, node: int) -> None:
            if node == 0 and not arrived:
                arrived.append(connected)
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            super().__init__(connected, node)

    monkeypatch.setattr("engine.parallel.nodes.NodeLink", ResetAtFirst)
    meeting = meet(2)
    meeting.listen()
    own, message = meeting.join(1).result(HANG_S)
    (theirs,) = meeting.links.result(HANG_S)
    with ends(own, theirs):
        assert message == GO
    assert arrived[0].fileno() == -1


class NoRanks:
    """Stands in for `Followers`."""

    def wait_ready(self, *, is_timed: bool) -> None:
        assert not is_timed

    def close(self) -> None:
        pass


def linked(meet: Callable[..., Meeting]) -> tuple[NodeLink, NodeLink]:
    """The ends of node 1 and of node 0."""
    meeting = meet(2)
    meeting.listen()
    own, _ = meeting.join(1).result(HANG_S)
    (theirs,) = meeting.links.result(HANG_S)
    return own, theirs


def test_an_error_of_a_rank_is_told_to_node_0_and_ends_this_one(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.node.SETTLE_S", 0.01)
    own, theirs = linked(meet)
    ended: list[Exception] = []
    on_rank_failure(own, threading.Event(), ended.append)(StepError("rank 1: no memory"))
    assert [str(error) for error in ended] == ["rank 1: no memory"]
    assert json.loads(theirs.recv_bytes())["text"] == "rank 1: no memory"
    own.close()
    theirs.close()


def test_an_error_of_a_rank_because_node_0_has_gone_is_that(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.node.SETTLE_S", HANG_S)
    own, theirs = linked(meet)
    lost, ended = threading.Event(), list[Exception]()
    node = Node(own, NoRanks(), lost)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        failed = pool.submit(on_rank_failure(own, lost, ended.append), StepError("gloo: connection closed by peer"))
        running = pool.submit(node.run)
        theirs.close()
        with pytest.raises(StepError, match=r"node 0 \(127\.0\.0\.1\) has ended, or cannot be reached any more"):
            running.result(HANG_S)
        failed.result(HANG_S)
    assert ended == []
