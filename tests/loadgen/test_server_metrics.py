"""Metrics of a server that wants a key, or speaks TLS."""

import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadgen.errors import TargetError
from loadgen.server_metrics import read_server_metrics
from loadgen.target.base import TargetSpec


@pytest.fixture
def serve():
    """serve(tls) -> a server with `seen`: the authorization of each request; /moved points at `moved_to`."""
    servers = []

    def start(tls=None):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.seen.append(self.headers["authorization"])
                self.send_response(302 if self.path == "/moved" else 200)
                if self.path == "/moved":
                    self.send_header("location", server.moved_to)
                self.end_headers()
                self.wfile.write(b"up 1\n")

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.seen = []
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.cert, tls.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("target", ["grpc://127.0.0.1:50051", "http://127.0.0.1:8000/v1"])
def test_the_servers_key_goes_along(serve, target):
    server = serve()
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    assert read_server_metrics(url, TargetSpec(target, api_key="k")) == "up 1\n"
    assert read_server_metrics(url, TargetSpec(target)) == "up 1\n"
    assert server.seen == ["Bearer k", None]


def test_no_proxy_of_the_environment_sees_the_key(serve, monkeypatch):
    server, proxy = serve(), serve()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
    spec = TargetSpec("grpc://127.0.0.1:50051", api_key="k")
    assert read_server_metrics(f"http://127.0.0.1:{server.server_port}/metrics", spec) == "up 1\n"
    assert (server.seen, proxy.seen) == (["Bearer k"], [])


@pytest.mark.parametrize("target", ["grpcs://127.0.0.1:1", "https://127.0.0.1:1/v1"])
def test_a_key_that_travels_encrypted_is_not_sent_in_the_clear(serve, target):
    server = serve()
    read_server_metrics(f"http://127.0.0.1:{server.server_port}/metrics", TargetSpec(target, api_key="k"))
    assert server.seen == [None]


def test_no_other_host_gets_the_key(serve):
    server, other = serve(), serve()
    server.moved_to = f"http://localhost:{other.server_port}/metrics"
    spec = TargetSpec("grpc://127.0.0.1:50051", api_key="k")
    read_server_metrics(f"http://localhost:{other.server_port}/metrics", spec)
    read_server_metrics(f"http://127.0.0.1:{server.server_port}/moved", spec)
    assert server.seen == ["Bearer k"]
    assert other.seen == [None, None]


def test_the_targets_certificates_count_here_too(serve, make_authority):
    authority = make_authority("ours")
    server = serve(authority.sign("server"))
    url = f"https://127.0.0.1:{server.server_port}/metrics"
    spec = TargetSpec("grpcs://127.0.0.1:1", tls_ca=authority.ca, api_key="k")
    assert read_server_metrics(url, spec) == "up 1\n"
    assert server.seen == ["Bearer k"]
    with pytest.raises(TargetError, match=r"--metrics-url https://.*CERTIFICATE_VERIFY_FAILED"):
        read_server_metrics(url, TargetSpec("grpcs://127.0.0.1:1", tls_ca=make_authority("theirs").ca))


def test_an_address_without_http_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x00\x00 no HTTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TargetError, match=r"--metrics-url http://127\.0\.0\.1:\d+/metrics: BadStatusLine: no HTTP"):
            read_server_metrics(url, TargetSpec("null:"))
        thread.join()
    with pytest.raises(TargetError, match="--metrics-url http://localhost:abc: InvalidURL: no HTTP address"):
        read_server_metrics("http://localhost:abc", TargetSpec("null:"))
