"""Compressed bodies."""

import asyncio
import gzip
import json
import tracemalloc
import zlib

import aiohttp
import pytest

from frontend.api.http.content_coding import gunzipped
from frontend.api.http.errors import BodyError
from frontend.limits import MAX_REQUEST_BYTES

BODY = json.dumps({"prompt": "abc"}).encode()
PACKED = gzip.compress(BODY, mtime=0)  # the same in every process: tests are named after it


@pytest.fixture(scope="module")
def bomb():
    """200 MiB of zeros in 200 KiB."""
    return gzip.compress(bytes(200 << 20), 9)


@pytest.fixture
async def session(http_pair):
    async with aiohttp.ClientSession(f"http://127.0.0.1:{http_pair.app.http_port}") as session:
        yield session


async def post(session, data, coding):
    headers = {"content-type": "application/json", "content-encoding": coding}
    # As aiohttp has no compressing of its own once the header is there, the bytes go as they are.
    async with session.post("/v1/completions", data=data, headers=headers) as response:
        return response.status, response.headers, await response.json()


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP", "identity", "identity, gzip"])
async def test_gzip_and_identity_are_taken(session, coding):
    data = BODY if coding == "identity" else PACKED
    status, _, answer = await post(session, data, coding)
    assert (status, answer["choices"][0]["text"]) == (200, "abc")


@pytest.mark.parametrize("coding", ["br", "deflate", "zstd", "gzip, gzip", "gzip, br", "nonsense"])
async def test_another_coding_is_refused_by_name(session, coding):
    status, headers, answer = await post(session, BODY, coding)
    assert (status, answer["error"]["code"]) == (415, "unsupported_content_encoding")
    assert repr(coding) in answer["error"]["message"]
    assert headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (BODY, "incorrect header"),
        (zlib.compress(BODY), "incorrect header"),
        (PACKED[:-1], "ends too early"),
        (PACKED[:12], "ends too early"),
        (b"", "ends too early"),
        (PACKED[:-8] + bytes(8), "incorrect data check"),
        (PACKED * 2, "more bytes follow"),
        (PACKED + b"x", "more bytes follow"),
    ],
)
async def test_what_is_not_gzip_is_refused(session, data, reason):
    status, _, answer = await post(session, data, "gzip")
    assert status == 400
    assert reason in answer["error"]["message"]


async def test_a_bomb_is_refused_and_never_unpacked(session, bomb):
    status, _, answer = await post(session, bomb, "gzip")
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert f"{MAX_REQUEST_BYTES} bytes when decompressed" in answer["error"]["message"]


async def test_decompression_takes_no_more_memory_than_its_bound(bomb):
    max_bytes = 1 << 20
    tracemalloc.start()
    with pytest.raises(BodyError):
        await gunzipped(bomb, max_bytes)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * max_bytes  # the output grows by doubling, and its old half is there meanwhile


async def test_a_body_at_the_bound_passes():
    assert await gunzipped(gzip.compress(b"x" * 1000), 1000) == b"x" * 1000
    with pytest.raises(BodyError, match="more than 999 bytes"):
        await gunzipped(gzip.compress(b"x" * 1000), 999)


async def test_the_event_loop_goes_on_while_a_body_is_decompressed(monkeypatch):
    started, loop = asyncio.Event(), asyncio.get_running_loop()
    goes_on = asyncio.run_coroutine_threadsafe
    decompressobj = zlib.decompressobj

    def slow_start(*args):
        loop.call_soon_threadsafe(started.set)
        goes_on(asyncio.sleep(0), loop).result(10)  # only a loop that runs can answer this
        return decompressobj(*args)

    monkeypatch.setattr(zlib, "decompressobj", slow_start)
    assert await gunzipped(PACKED, 1000) == BODY
    assert started.is_set()
