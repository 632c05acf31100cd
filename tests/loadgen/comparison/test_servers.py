"""Servers are started, waited for, stopped with all they started, and what goes wrong is said with their last words."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.comparison.servers import ServerSpec, read_servers, running
from loadgen.errors import OptionError, TargetError
from loadgen.processes import held_port
from tests.hang import HANG_S
from tests.support.processes import wait_gone

LISTEN = """
import os, signal, socket, sys, time
listener = socket.socket(); listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(os.environ["PORT"])))
print("listening in", os.getcwd(), flush=True)
listener.listen()
"""
FOR_EVER = "signal.pause()"


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


def server(port: int, script: str, **changes: object) -> ServerSpec:
    values: dict[str, object] = {
        "label": "new",
        "command": (sys.executable, "-c", textwrap.dedent(script)),
        "target": f"grpc://127.0.0.1:{port}",
        "ready": f"tcp:127.0.0.1:{port}",
        "env": {"PORT": str(port)},
        "ready_timeout_s": HANG_S,
        **changes,
    }
    return ServerSpec(**values)  # type: ignore[arg-type]


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=HANG_S).close()
    except OSError:
        return False
    return True


def test_it_is_there_inside_and_gone_after(port: int, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with running(server(port, LISTEN + FOR_EVER, cwd=tmp_path / "home"), tmp_path / "log"):
        assert answers(port)
    assert not answers(port)
    assert (tmp_path / "log").read_text().strip() == f"listening in {tmp_path / 'home'}"


def test_it_is_gone_after_an_error_inside(port: int, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), running(server(port, LISTEN + FOR_EVER), tmp_path / "log"):
        raise ZeroDivisionError
    assert not answers(port)


def test_it_can_be_started_again_at_once(port: int, tmp_path: Path) -> None:
    for turn in range(2):
        with running(server(port, LISTEN + FOR_EVER), tmp_path / f"log{turn}"):
            assert answers(port)


def test_http_is_ready_when_it_says_so(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 to the first two, 200 from then on. A proxy that the environment names is not asked."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    script = """
        import http.server, os
        asked = []
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                print("asked", asked, flush=True)
                self.send_response(503 if len(asked) < 3 else 200)
                self.end_headers()
        http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
    """
    with running(server(port, script, ready=f"http://127.0.0.1:{port}/ready"), tmp_path / "log"):
        pass
    assert "asked ['/ready', '/ready', '/ready']" in (tmp_path / "log").read_text()


def test_an_answer_that_is_not_http_is_not_ready(port: int, tmp_path: Path) -> None:
    script = """
        asked = 0
        while True:
            connection, _ = listener.accept()
            asked += 1
            print("asked", asked, flush=True)
            with connection:
                connection.recv(4096)
                connection.sendall(b"not yet\\n" if asked < 3 else b"HTTP/1.0 200 OK\\r\\n\\r\\n")
    """
    waiting = server(port, LISTEN + textwrap.dedent(script), ready=f"http://127.0.0.1:{port}/ready")
    with running(waiting, tmp_path / "log"):
        pass
    assert "asked 3" in (tmp_path / "log").read_text()


def test_a_unix_socket_can_be_waited_for(port: int, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    script = f"""
        import signal, socket
        listener = socket.socket(socket.AF_UNIX); listener.bind({str(path)!r}); listener.listen()
        signal.pause()
    """
    with running(server(port, script, ready=f"unix:{path}"), tmp_path / "log"):
        pass


def test_one_that_ends_says_why(port: int, tmp_path: Path) -> None:
    script = "print('loading'); print('no such checkpoint: demo'); raise SystemExit(4)"
    with (
        pytest.raises(
            TargetError, match=r"new: the server ended with status 4 while starting: loading \| no such checkpoint"
        ),
        running(server(port, script), tmp_path / "log"),
    ):
        pytest.fail("it never was ready")


def test_one_that_is_never_ready_is_given_up_and_killed(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def spy(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(*arguments, **options))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr("loadgen.processes.subprocess.Popen", spy)
    with (
        pytest.raises(TargetError, match=r"new: the server is not ready after 0.3 s"),
        running(server(port, "import signal; signal.pause()", ready_timeout_s=0.3), tmp_path / "log"),
    ):
        pytest.fail("it never was ready")
    assert started[0].returncode is not None


def test_another_server_in_its_place_is_refused(port: int, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(TargetError, match=r"something answers at .* before the server was started; stop it first"),
        running(server(port, FOR_EVER), tmp_path / "log"),
    ):
        pytest.fail("it is not ours")


def test_a_command_that_does_not_exist_is_named(port: int, tmp_path: Path) -> None:
    with (
        pytest.raises(TargetError, match="new: /no/such/server --fast: No such file"),
        running(server(port, "", command=("/no/such/server", "--fast")), tmp_path / "log"),
    ):
        pytest.fail("it cannot run")


def test_it_is_stopped_with_the_signal_it_wants(port: int, tmp_path: Path) -> None:
    block = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
    wait = "signal.sigwait({signal.SIGUSR1})\nprint('goodbye')"
    with running(server(port, block + LISTEN + wait, stop_signal=signal.SIGUSR1), tmp_path / "log"):
        pass
    assert (tmp_path / "log").read_text().endswith("goodbye\n")


def test_one_that_will_not_stop_is_killed_with_its_children(port: int, tmp_path: Path) -> None:
    script = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True)\n" + LISTEN + FOR_EVER
    )
    with running(server(port, script, stop_timeout_s=0.2), tmp_path / "log"):
        child = int((tmp_path / "log").read_text().split()[0])
        os.kill(child, 0)
    assert not answers(port)
    wait_gone(child)


GOOD = """
[a]
command = ["serve", "--port", "1"]
target = "grpc://127.0.0.1:1"

[b]
label = "new one"
command = "serve --name 'a b'"
target = "http://localhost:8000/v1"
ready = "http://localhost:8000/health"
ready_timeout_s = 5
env = { THREADS = 2 }
cwd = "somewhere"
stop_signal = "SIGINT"
stop_timeout_s = 1.5
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "servers.toml"
    path.write_text(GOOD)
    first, second = read_servers(path)
    assert first == ServerSpec("a", ("serve", "--port", "1"), "grpc://127.0.0.1:1", "tcp:127.0.0.1:1")
    assert second == ServerSpec(
        "new one", ("serve", "--name", "a b"), "http://localhost:8000/v1", "http://localhost:8000/health", 5.0,
        {"THREADS": "2"}, Path("somewhere"), signal.SIGINT, 1.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "ready"),
    [
        ("grpc://[::1]:50051", "tcp:[::1]:50051"),
        ("grpc+unix:/run/engine.sock", "unix:/run/engine.sock"),
        ("http://localhost:8000/v1", "tcp:localhost:8000"),
    ],
)
def test_without_a_probe_the_target_is_asked(target: str, ready: str, tmp_path: Path) -> None:
    path = tmp_path / "servers.toml"
    path.write_text(GOOD.replace("grpc://127.0.0.1:1", target))
    assert read_servers(path)[0].ready == ready


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[b]", "[c]", r"has a, c; must have \[a\] and \[b\]"),
        ("[a]", "a = 1\n[x]", "has a, b, x; must have"),
        ('command = ["serve", "--port", "1"]\n', "", r"\[a\] command is missing"),
        ('target = "grpc://127.0.0.1:1"', "", r"\[a\] target is missing"),
        ("cwd", "folder", r"\[b\] folder is not known; there are label, command"),
        ("ready_timeout_s = 5", 'ready_timeout_s = "5"', r"\[b\] ready_timeout_s = '5' must be int or float"),
        ("ready_timeout_s = 5", "ready_timeout_s = true", "must be int or float"),
        ("stop_timeout_s = 1.5", "stop_timeout_s = 0", r"\[b\] stop_timeout_s = 0 must be above 0"),
        ('"SIGINT"', '"SIGSTOPPED"', r"\[b\] stop_signal = 'SIGSTOPPED' is no signal"),
        ('"http://localhost:8000/health"', '"8000"', r"\[b\] ready = '8000' must be http://"),
        ('"http://localhost:8000/health"', '"tcp:localhost"', r"\[b\] ready = 'tcp:localhost' must be"),
        ("grpc://127.0.0.1:1", "null:", r"\[a\] ready = 'tcp:' must be"),
        ("[a]", "[a", "is not TOML"),
        ("env = { THREADS = 2 }", "env = 3", r"\[b\] env = 3 must be dict"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_named(old: str, new: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "servers.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(OptionError, match=why) as caught:
        read_servers(path)
    assert str(caught.value).startswith(f"--servers {path}: ")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        read_servers(tmp_path / "servers.toml")
