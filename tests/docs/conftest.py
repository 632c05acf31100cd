"""One reader for all pages, with the pair running as README.md says to run it; both end with the module."""

from collections.abc import Iterator

import pytest

from tests.docs.reader import Reader, Server, find, write_traces


@pytest.fixture(scope="module")
def fresh_reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """In a folder of its own, with nothing running."""
    reader = Reader(tmp_path_factory.mktemp("clone"))
    write_traces(reader.folder)
    return reader


@pytest.fixture(scope="module")
def servers(fresh_reader: Reader) -> Iterator[list[Server]]:
    """The engine and the frontend, both saying in their logs all that the pages show of them."""
    reader = fresh_reader
    reader.variables = {"CHAIRLIFT_LOG_STATS_INTERVAL": "0.2"}
    with reader.serve(find(r"chairlift-engine --model \S+ --port 50052")) as engine:
        reader.ports["50052"] = engine.ports["50052"]
        reader.variables |= {"CHAIRLIFT_LOG_REQUESTS": "1", "CHAIRLIFT_TOOL_CALL_PARSER": "hermes"}
        with reader.serve(find(r"chairlift-frontend --engine 127\.0\.0\.1:50052 --port 50051")) as frontend:
            reader.ports |= frontend.ports
            reader.variables = {}
            yield [engine, frontend]


@pytest.fixture(scope="module")
def reader(fresh_reader: Reader, servers: list[Server]) -> Reader:
    """At the pair."""
    assert len(servers) == 2
    return fresh_reader


@pytest.fixture
def certificates(request: pytest.FixtureRequest, reader: Reader) -> None:
    """For a command that speaks TLS: chain.pem and key.pem, signed by an authority that the reader's machine trusts."""
    if "--tls" not in request.getfixturevalue("command").text:
        return
    authority = request.getfixturevalue("make_authority")("ours")
    signed = authority.sign("localhost")
    (reader.folder / "chain.pem").write_bytes(signed.cert.read_bytes())
    (reader.folder / "key.pem").write_bytes(signed.key.read_bytes())
    (reader.folder / "ca.pem").write_bytes(authority.ca.read_bytes())
    reader.variables["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = str(reader.folder / "ca.pem")
