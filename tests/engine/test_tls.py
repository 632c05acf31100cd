"""Addresses that need TLS, peers that are served, and log lines about the others."""

import logging
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.serving.listener import Listener
from engine.serving.server import EngineService
from engine.tls import Handshakes, check_exposure, server_credentials
from tests.hang import HANG_S

FILES: dict[str, Any] = {"tls_cert": Path("c"), "tls_key": Path("k"), "tls_client_ca": Path("a")}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "engine.example"])
def test_an_address_beyond_this_machine_needs_mutual_tls_or_a_flag(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host} is open to other machines: add --tls-cert"):
        check_exposure(EngineConfig(model="m", host=host))
    check_exposure(EngineConfig(model="m", host=host, insecure_bind=True))
    check_exposure(EngineConfig(model="m", host=host, **FILES))
    check_exposure(EngineConfig(model="m", host=host, uds=Path("s")))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_this_machine_is_no_danger(host: str) -> None:
    check_exposure(EngineConfig(model="m", host=host))


@pytest.mark.parametrize("missing", FILES)
def test_tls_without_a_client_ca_is_no_tls(missing: str) -> None:
    config = EngineConfig(model="m", **{name: path for name, path in FILES.items() if name != missing})
    flag = f"--{missing.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"belong together: {flag} missing"):
        check_exposure(config)


def config_of(served: Any, ca: Path) -> EngineConfig:
    return EngineConfig(model="m", tls_cert=served.cert, tls_key=served.key, tls_client_ca=ca)


async def ask(address: str, credentials: grpc.ChannelCredentials) -> pb.EngineState:
    async with grpc.aio.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        answer = await EngineServiceStub(channel).GetEngineStatus(pb.GetEngineStatusRequest(), timeout=HANG_S)
        return answer.status.state


async def test_only_peers_with_a_signed_certificate_are_served_and_others_are_logged(
    make_authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine")
    ours, theirs = make_authority("ours"), make_authority("theirs")
    served, good, bad = ours.sign("server"), ours.sign("client"), theirs.sign("client")
    handshakes = Handshakes()
    credentials = server_credentials(config_of(served, ours.ca), handshakes)
    listener = Listener(EngineService(), "127.0.0.1:0", credentials, [handshakes])
    await listener.start()

    def client(certificate: Any) -> grpc.ChannelCredentials:
        pair = (certificate.key.read_bytes(), certificate.cert.read_bytes()) if certificate else (None, None)
        return grpc.ssl_channel_credentials(ours.ca.read_bytes(), *pair)

    try:
        assert await ask(listener.address, client(good)) == pb.ENGINE_STATE_LOADING
        assert "TLS handshake" not in caplog.text
        for certificate in (bad, None, bad):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(listener.address, client(certificate))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caplog.text.count("began a TLS handshake and made no call") == 1
        assert await ask(listener.address, client(good)) == pb.ENGINE_STATE_LOADING

        new = ours.sign("renewed")  # what is new on disk serves the next connection
        shutil.copy(new.key, served.key)
        shutil.copy(new.cert, served.cert)
        assert await ask(listener.address, client(good)) == pb.ENGINE_STATE_LOADING
        assert "TLS certificate reloaded" in caplog.text
        served.cert.write_text("no certificate")
        assert await ask(listener.address, client(good)) == pb.ENGINE_STATE_LOADING
        assert "TLS certificate not reloaded, the old one stays in use: --tls-cert" in caplog.text
    finally:
        await listener.stop(0)


def test_failed_handshakes_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    handshakes = Handshakes()
    for now_s in range(150):
        handshakes.begin(float(now_s))
    assert caplog.text.count("made no call") == 3


@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-client-ca"])
def test_files_that_are_of_no_use_are_named(make_authority: Any, tmp_path: Path, flag: str) -> None:
    ours = make_authority("ours")
    served = ours.sign("server")
    broken = tmp_path / "broken"
    broken.write_text("no certificate")
    config = config_of(served._replace(cert=broken) if flag == "--tls-cert" else served, ours.ca)
    if flag == "--tls-client-ca":
        config = config_of(served, broken)
    with pytest.raises(ConfigError, match=f"{flag} {broken}"):
        server_credentials(config, Handshakes())
