"""A request over HTTP whose connection the test holds, to read slowly, or to leave."""

import asyncio
import json
import socket
from typing import Any


async def open_request(
    pair: Any, path: str = "/v1/completions", receive_buffer: int | None = None, **body: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request over a connection of its own; returns its two ends."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", pair.app.http_port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 10)
    data = json.dumps(body).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer
