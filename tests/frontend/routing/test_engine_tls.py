"""TLS to engines: which connections are accepted, and how the log explains the others."""

import asyncio
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from frontend.access.engine_tls import EngineTls
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from frontend.routing import connection
from tests.hang import HANG_S
from tests.support.frontend.fake_engine import FakeEngine


class TlsEngine(FakeEngine):
    """Shows a certificate and wants one that an authority has signed."""

    def __init__(self, cert: Path, key: Path, client_ca: Path) -> None:
        super().__init__()
        self.credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), cert.read_bytes())], client_ca.read_bytes(), require_client_auth=True
        )


@dataclasses.dataclass
class Parties:
    engine: TlsEngine
    ca: Path
    cert: Path
    key: Path
    other_ca: Path
    other_cert: Path
    other_key: Path


@pytest.fixture
def parties(make_authority):
    ours, theirs = make_authority("ours"), make_authority("theirs")
    served, client, other = ours.sign("server"), ours.sign("client"), theirs.sign("client")
    engine = TlsEngine(served.cert, served.key, ours.ca)
    return Parties(engine, ours.ca, client.cert, client.key, theirs.ca, other.cert, other.key)


async def said(caplog: pytest.LogCaptureFixture, words: str) -> None:
    async with asyncio.timeout(HANG_S):
        while words not in caplog.text:
            await asyncio.sleep(0.01)  # an attempt to attach


async def test_frontend_with_a_certificate_is_served(make_pair, parties, text_request):
    pair = await make_pair(
        engine=parties.engine,
        engine_tls_ca=parties.ca,
        engine_tls_client_cert=parties.cert,
        engine_tls_client_key=parties.key,
    )
    assert [m async for m in pair.stub().StreamGenerate(text_request("abc"))][-1].HasField("finished")


REFUSALS: dict[str, tuple[Callable[[Parties], dict[str, Path]], str]] = {
    "no TLS": (lambda p: {}, "the engine requires TLS: set --engine-tls-ca and --engine-tls-client-cert"),
    "no certificate": (lambda p: {"engine_tls_ca": p.ca}, "or got none: set --engine-tls-client-cert"),
    "foreign certificate": (
        lambda p: {
            "engine_tls_ca": p.ca,
            "engine_tls_client_cert": p.other_cert,
            "engine_tls_client_key": p.other_key,
        },
        "the engine does not accept this frontend's certificate",
    ),
    "foreign engine": (
        lambda p: {
            "engine_tls_ca": p.other_ca,
            "engine_tls_client_cert": p.cert,
            "engine_tls_client_key": p.key,
        },
        "--engine-tls-ca does not accept the engine's certificate",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_refused_connection_is_explained_in_one_log_line(make_pair, parties, caplog, case):
    flags, words = REFUSALS[case]
    await make_pair(engine=parties.engine, wait=False, **flags(parties))
    await said(caplog, words)
    lines = [record.message for record in caplog.records if record.name == connection.__name__]
    assert len([line for line in lines if words in line]) == 1


async def test_engine_without_tls_is_refused(make_pair, parties, caplog):
    await make_pair(wait=False, engine_tls_ca=parties.ca)
    await said(caplog, "the engine uses no TLS but this frontend does")


async def test_renewed_client_certificate_is_used_for_the_next_connection(parties, tmp_path):
    cert, key = tmp_path / "used.pem", tmp_path / "used.key"
    shutil.copy(parties.cert, cert)
    shutil.copy(parties.key, key)
    tls = EngineTls(parties.ca, cert, key)
    tls.credentials()
    cert.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"--engine-tls-client-cert .*used\.pem"):
        tls.credentials()
    shutil.copy(parties.other_cert, cert)
    shutil.copy(parties.other_key, key)
    tls.credentials()


def test_unusable_files_are_named(parties, tmp_path):
    with pytest.raises(ConfigError, match=r"--engine-tls-ca .* contains no PEM certificates"):
        EngineTls(tmp_path / "missing", None, None)
    with pytest.raises(ConfigError, match="belong together"):
        FrontendConfig(engine_tls_ca=parties.ca, engine_tls_client_cert=parties.cert)
    with pytest.raises(ConfigError, match="needs --engine-tls-ca"):
        FrontendConfig(engine_tls_client_cert=parties.cert, engine_tls_client_key=parties.key)
