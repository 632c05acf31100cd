"""Certificates and keys are reloaded while the server runs: new connections use them, running calls continue."""

import asyncio
import socket
import ssl

import aiohttp
import grpc
import pytest

from chairlift import AsyncClient, GenerationError, Tls
from chairlift.v1 import generation_service_pb2 as pb
from frontend.access import file_watch
from frontend.access.file_watch import FileWatch
from frontend.errors import ConfigError
from tests.hang import HANG_S


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(file_watch, "_INTERVAL_S", 0.02)


async def logged(caplog, text, count=1):
    """Waits until a text has been logged."""
    async with asyncio.timeout(HANG_S):
        while caplog.text.count(text) < count:
            await asyncio.sleep(0.01)


def put(source, target):
    """Replaces a file atomically, as certificate managers do."""
    copy = target.with_suffix(".new")
    copy.write_bytes(source.read_bytes())
    copy.replace(target)


def served_by(port, ca):
    """Returns the name on the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return dict(entry for (entry,) in connection.getpeercert()["subject"])["commonName"]


async def test_renewed_certificate_is_used_for_new_connections_and_breaks_no_stream(make_pair, make_authority, caplog):
    caplog.set_level("INFO")
    authority = make_authority("ours")
    first, second = authority.sign("first"), authority.sign("second")
    pair = await make_pair(http=True, tls_cert=first.cert, tls_key=first.key)
    pair.engine.step_interval_s = 0.001
    ports = (pair.app.port, pair.app.http_port)

    async def names():
        return [await asyncio.to_thread(served_by, port, authority.ca) for port in ports]

    assert await names() == ["first", "first"]
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with grpc.aio.secure_channel(f"127.0.0.1:{pair.app.port}", credentials) as channel:
        stream = channel.unary_stream(
            "/chairlift.v1.GenerationService/StreamGenerate",
            request_serializer=pb.StreamGenerateRequest.SerializeToString,
            response_deserializer=pb.StreamGenerateResponse.FromString,
        )
        spec = pb.GenerationSpec(text="abc" * 100, stop=pb.StopOptions(max_tokens=301))
        call = stream(pb.StreamGenerateRequest(spec=spec))
        await call.read()
        put(second.cert, first.cert)  # without the matching key
        await logged(caplog, "TLS certificate not reloaded, the old content stays in use: --tls-cert")
        assert await names() == ["first", "first"]
        put(second.key, first.key)
        await logged(caplog, "TLS certificate reloaded")
        assert await names() == ["second", "second"]
        assert await names() == ["second", "second"]
        text = ""
        while (message := await call.read()) is not grpc.aio.EOF:
            text += message.chunk.text
    assert text == "abc" * 100


async def test_client_certificates_are_still_required_after_a_reload(make_pair, make_authority, caplog):
    caplog.set_level("INFO")
    authority = make_authority("ours")
    first, second, client = authority.sign("first"), authority.sign("second"), authority.sign("client")
    pair = await make_pair(tls_cert=first.cert, tls_key=first.key, tls_client_ca=authority.ca)
    put(second.key, first.key)
    put(second.cert, first.cert)
    await logged(caplog, "TLS certificate reloaded")
    address = f"127.0.0.1:{pair.app.port}"
    async with AsyncClient(address, tls=Tls(ca=authority.ca, cert=client.cert, key=client.key)) as known:
        assert (await known.generate("abc")).text == "abc"
    async with AsyncClient(address, tls=Tls(ca=authority.ca)) as unknown:
        with pytest.raises(GenerationError):
            await unknown.generate("abc", timeout_s=5)


async def test_api_keys_are_reloaded_for_grpc_and_http(make_pair, tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "keys"
    path.write_text("old\n")
    pair = await make_pair(http=True, api_key=("flag",), api_key_file=path)

    async def taken(key):
        headers = {"authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{pair.app.http_port}/v1/models"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
            over_http = response.status == 200
        call = pair.stub().GetModel(pb.GetModelRequest(), metadata=[("authorization", f"Bearer {key}")])
        code = await call.code()
        assert code is (grpc.StatusCode.OK if over_http else grpc.StatusCode.UNAUTHENTICATED)
        return over_http

    assert [await taken(key) for key in ("flag", "old", "new")] == [True, True, False]
    path.write_text("new\n")
    await logged(caplog, "API keys reloaded")
    assert [await taken(key) for key in ("flag", "old", "new")] == [True, False, True]
    path.write_text("# none left\n")
    await logged(caplog, "API keys not reloaded, the old content stays in use: --api-key-file")
    path.unlink()
    await logged(caplog, "API keys not reloaded, the old content stays in use: --api-key-file", count=2)
    assert [await taken(key) for key in ("flag", "old", "new")] == [True, False, True]


async def test_file_that_stays_invalid_is_logged_once(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_text("good")
    calls = []

    def reload():
        calls.append(path.read_text())
        raise ConfigError("it is bad")

    watch = FileWatch("a file", [path], reload)
    watch.start()
    path.write_text("bad")
    async with asyncio.timeout(HANG_S):
        while len(calls) < 20:
            await asyncio.sleep(0.01)
    assert set(calls) == {"bad"}
    assert caplog.text.count("it is bad") == 1
    await watch.stop()


async def test_reload_that_failed_is_tried_again_although_the_file_is_as_before(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "file"
    path.write_text("old")
    problems = ["Permission denied", "Permission denied", "Too many open files"]

    def reload():
        if problems:
            raise ConfigError(problems.pop(0))

    watch = FileWatch("a file", [path], reload)
    watch.start()
    path.write_text("renewed")
    await logged(caplog, "a file reloaded")
    assert [caplog.text.count(text) for text in ("Permission denied", "Too many open files", "reloaded,")] == [1, 1, 2]
    await watch.stop()
