"""A frontend without a free file leaves new connections waiting, serves those that it has, and says so briefly."""

import asyncio
import contextlib
import os
import resource
import socket

import pytest

from frontend.api.http import listener
from frontend.api.http.listener import Listener

NUM_CLIENTS = 20


class Echo(asyncio.Protocol):
    """Sends back what it gets."""

    num_lost = 0

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)

    def connection_lost(self, _):
        Echo.num_lost += 1


@pytest.fixture
def listening():
    """A listening socket with clients in its queue."""
    clients = []
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=2 * NUM_CLIENTS)) as listening:
        for _ in range(NUM_CLIENTS):
            clients.append(socket.create_connection(listening.getsockname()))
            clients[-1].setblocking(False)
        yield listening, clients
    for client in clients:
        client.close()


@contextlib.contextmanager
def no_free_file():
    """Takes all files that this process may open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, limits[1]))  # each has the lowest number that is free
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def echo(client):
    """One exchange."""
    await asyncio.get_running_loop().sock_sendall(client, b"x")
    return await asyncio.get_running_loop().sock_recv(client, 10)


async def test_connections_wait_for_a_free_file_and_are_served_then(listening, caplog, monkeypatch):
    monkeypatch.setattr(listener, "_PAUSE_S", 0.01)
    server, clients = listening
    with no_free_file():
        taking = Listener(server, Echo, tls=None, handshake_timeout_s=1.0)
        for _ in range(3):
            caplog.clear()
            while not caplog.records:
                await asyncio.sleep(0.001)
            (record,) = caplog.records
            assert record.message == "new connections wait: Too many open files; raise the limit (ulimit -n)"
            assert record.exc_info is None
    assert await asyncio.gather(*map(echo, clients)) == [b"x"] * NUM_CLIENTS
    taking.close()
    for client in clients:
        client.close()
    while Echo.num_lost < NUM_CLIENTS:
        await asyncio.sleep(0.001)


async def test_no_connection_is_taken_after_the_end_not_even_after_a_pause(listening, monkeypatch):
    server, clients = listening
    with no_free_file():
        taking = Listener(server, Echo, tls=None, handshake_timeout_s=1.0)
        while taking._pause is None:
            await asyncio.sleep(0.001)
        taking.close()
        taking.close()
    assert taking._pause.cancelled()
    with pytest.raises(ConnectionResetError):
        await echo(clients[0])


async def test_so_they_do_at_the_frontends_port(http_pair, caplog):
    client = socket.create_connection(("127.0.0.1", http_pair.app.http_port))
    with contextlib.closing(client), no_free_file():
        while not caplog.records:
            await asyncio.sleep(0.001)
        assert [(record.name, record.exc_info) for record in caplog.records] == [(listener.__name__, None)]
