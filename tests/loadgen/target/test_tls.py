"""Keys and TLS on the way to a server, with servers that insist on them."""

import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import web

from chairlift.v1 import generation_service_pb2 as pb
from loadgen.errors import TargetError
from loadgen.target.base import TargetSpec
from loadgen.target.open import open_target
from tests.hang import HANG_S

KEY = "the-key"


async def _get_model(request: bytes, context: Any) -> bytes:
    await _check(context)
    return pb.GetModelResponse(model="m", vocab_size=100, max_model_len=1000).SerializeToString()


async def _stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    await _check(context)
    length = pb.StreamGenerateRequest.FromString(request).spec.stop.max_tokens
    for event in (
        {"chunk": pb.Chunk(num_tokens=length)},
        {"finished": pb.Finished(usage={"num_output_tokens": length})},
    ):
        yield pb.StreamGenerateResponse(**event).SerializeToString()


async def _check(context: Any) -> None:
    if ("authorization", f"Bearer {KEY}") not in context.invocation_metadata():
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")


@pytest.fixture
def authority(make_authority: Callable[[str], Any]) -> Any:
    return make_authority("ours")


@pytest.fixture
def spec(authority: Any) -> TargetSpec:
    """With all that these servers want; the url is to be filled in."""
    mine = authority.sign("client")
    return TargetSpec("", api_key=KEY, tls_ca=authority.ca, tls_cert=mine.cert, tls_key=mine.key)


@pytest.fixture
async def grpc_url(authority: Any) -> AsyncIterator[str]:
    served = authority.sign("server")
    server = grpc.aio.server()
    handlers = {
        "GetModel": grpc.unary_unary_rpc_method_handler(_get_model),
        "StreamGenerate": grpc.unary_stream_rpc_method_handler(_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("chairlift.v1.GenerationService", handlers),))
    credentials = grpc.ssl_server_credentials(
        [(served.key.read_bytes(), served.cert.read_bytes())],
        root_certificates=authority.ca.read_bytes(),
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"grpcs://127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def http_url(authority: Any) -> AsyncIterator[str]:
    """A server that answers 401 to everybody whom TLS lets in."""
    served = authority.sign("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(served.cert, served.key)
    context.verify_mode = ssl.CERT_REQUIRED
    runner = web.AppRunner(web.Application())
    runner.app.router.add_route("*", "/{path:.*}", _refuse)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def _refuse(request: web.Request) -> web.Response:
    return web.Response(status=401)


async def probe(spec: TargetSpec) -> str:
    target = open_target(spec, probe_timeout_s=HANG_S)
    try:
        return (await target.probe()).model
    finally:
        await target.close()


async def test_grpc_with_key_and_certificates(grpc_url: str, spec: TargetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(spec, url=grpc_url)
    assert await probe(spec) == "m"
    monkeypatch.setenv("CHAIRLIFT_API_KEY", KEY)
    assert await probe(replace(spec, api_key="")) == "m"


async def test_grpc_without_the_key_says_where_it_goes(
    grpc_url: str, spec: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    with pytest.raises(TargetError, match=r"UNAUTHENTICATED.*put its key into CHAIRLIFT_API_KEY"):
        await probe(replace(spec, url=grpc_url, api_key=""))
    with pytest.raises(TargetError, match="UNAUTHENTICATED") as caught:
        await probe(replace(spec, url=grpc_url, api_key="mistyped"))
    assert "mistyped" not in str(caught.value)


@pytest.mark.parametrize("change", ["ca", "cert"])
async def test_certificates_count(
    grpc_url: str, http_url: str, spec: TargetSpec, make_authority: Callable[[str], Any], change: str
) -> None:
    theirs = {"tls_ca": make_authority("theirs").ca} if change == "ca" else {"tls_cert": None, "tls_key": None}
    with pytest.raises(TargetError):
        await probe(replace(spec, url=grpc_url, **theirs))
    completions = replace(spec, url=http_url, api="completions")
    with pytest.raises(TargetError, match="HTTP 401"):
        await probe(completions)
    with pytest.raises(TargetError) as caught:
        await probe(replace(completions, **theirs))
    assert "HTTP 401" not in str(caught.value)


async def test_files_of_no_use_are_said(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for url, api in (("grpcs://127.0.0.1:1", "grpc"), ("https://127.0.0.1:1/v1", "completions")):
        with pytest.raises(TargetError, match="No such file"):
            open_target(TargetSpec(url, api, tls_ca=missing))
        with pytest.raises(TargetError, match="belong together"):
            open_target(TargetSpec(url, api, tls_cert=missing))
        with pytest.raises(TargetError, match="printable ASCII") as caught:
            open_target(TargetSpec(url, api, api_key="hidden\nkey"))
        assert "hidden" not in str(caught.value)
