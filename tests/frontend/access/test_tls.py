"""TLS of gRPC and HTTP, with generated certificates."""

import asyncio
import ssl
import subprocess

import aiohttp
import grpc
import pytest

from chairlift import AsyncClient, Client, GenerationError, Tls
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.api.http import server as http_server
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from tests.hang import HANG_S


@pytest.fixture
def authority(make_authority):
    return make_authority("ours")


@pytest.fixture
def served(authority):
    return authority.sign("server")


@pytest.fixture
async def tls_pair(make_pair, served):
    return await make_pair(http=True, tls_cert=served.cert, tls_key=served.key)


@pytest.fixture
async def mtls_pair(make_pair, served, authority):
    return await make_pair(http=True, tls_cert=served.cert, tls_key=served.key, tls_client_ca=authority.ca)


async def over_grpc(pair, tls):
    async with AsyncClient(f"127.0.0.1:{pair.app.port}", tls=tls) as client:
        return (await client.generate("abc", timeout_s=HANG_S)).text


async def over_http(pair, tls):
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.post(f"https://127.0.0.1:{pair.app.http_port}/v1/completions", json={"prompt": "abc"}) as response,
    ):
        return (await response.json())["choices"][0]["text"]


async def assert_refused(pair, tls):
    with pytest.raises(GenerationError) as caught:
        await over_grpc(pair, tls)
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(aiohttp.ClientError):
        await over_http(pair, tls)


async def test_grpc_and_http_are_served_over_tls(tls_pair, authority):
    tls = Tls(ca=authority.ca)
    assert await over_grpc(tls_pair, tls) == "abc"
    assert await over_http(tls_pair, tls) == "abc"


async def test_blocking_client_uses_tls(tls_pair, authority):
    def call():
        with Client(f"127.0.0.1:{tls_pair.app.port}", tls=Tls(ca=authority.ca)) as client:
            return client.generate("abc", timeout_s=HANG_S).text

    assert await asyncio.to_thread(call) == "abc"


async def test_client_that_trusts_another_ca_refuses_the_server(tls_pair, make_authority):
    await assert_refused(tls_pair, Tls(ca=make_authority("theirs").ca))


async def test_plain_text_connections_are_refused(tls_pair):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tls_pair.stub().Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="abc")), timeout=HANG_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{tls_pair.app.http_port}/health")


async def test_http_connection_without_a_handshake_is_closed(make_pair, served, monkeypatch):
    assert http_server.HEAD_TIMEOUT_S == 20, "the limit in docs/limits.md"
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(asyncio.constants, "SSL_HANDSHAKE_TIMEOUT", 2 * HANG_S)  # asyncio's own limit
    pair = await make_pair(http=True, tls_cert=served.cert, tls_key=served.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
    async with asyncio.timeout(HANG_S):
        assert await reader.read() == b""
    writer.close()


async def test_client_certificate_is_required_and_checked(mtls_pair, authority, make_authority):
    known, stranger = authority.sign("client"), make_authority("theirs").sign("client")
    tls = Tls(ca=authority.ca, cert=known.cert, key=known.key)
    assert await over_grpc(mtls_pair, tls) == "abc"
    assert await over_http(mtls_pair, tls) == "abc"
    await assert_refused(mtls_pair, Tls(ca=authority.ca))
    await assert_refused(mtls_pair, Tls(ca=authority.ca, cert=stranger.cert, key=stranger.key))


async def test_api_key_is_required_over_tls(make_pair, served, authority, monkeypatch):
    pair = await make_pair(tls_cert=served.cert, tls_key=served.key, api_key=("the-key",))
    target, tls = f"127.0.0.1:{pair.app.port}", Tls(ca=authority.ca)
    async with AsyncClient(target, tls=tls, api_key="the-key") as client:
        assert (await client.generate("abc", timeout_s=HANG_S)).text == "abc"
    with pytest.raises(GenerationError) as caught:
        await over_grpc(pair, tls)
    assert caught.value.status is grpc.StatusCode.UNAUTHENTICATED
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "the-key")
    assert await over_grpc(pair, tls) == "abc"


async def test_grpc_checks_the_servers_name(tls_pair, authority):
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    options = [("grpc.ssl_target_name_override", "other.example.org"), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{tls_pair.app.port}", credentials, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await GenerationServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=HANG_S)


def test_unusable_files_are_named_in_the_error(authority, served, tmp_path):
    other = authority.sign("other")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", served.key, "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    junk = tmp_path / "junk"
    junk.write_text("junk")
    missing = tmp_path / "missing"

    def complaint(cert, key, client_ca=None):
        with pytest.raises(ConfigError) as caught:
            FrontendApp(FrontendConfig(tls_cert=cert, tls_key=key, tls_client_ca=client_ca))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert complaint(missing, served.key) == f"--tls-cert {missing} cannot be read: No such file or directory"
    assert complaint(served.cert, missing) == f"--tls-key {missing} cannot be read: No such file or directory"
    for cert, key in ((junk, served.key), (served.cert, junk), (served.cert, other.key), (served.cert, locked)):
        assert "are not a PEM certificate and its unencrypted key" in complaint(cert, key)
    assert complaint(served.cert, served.key, junk) == f"--tls-client-ca {junk} contains no PEM certificates"
    assert "cannot be read" in complaint(served.cert, served.key, missing)
