"""`chairlift up` as a process of its own, with a scripted program in the engine's place."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from chairlift import Client, GenerationError

SCRIPT = Path(__file__).with_name("scripted_engine.py")
RUN_UP = """\
import sys
import chairlift.service.signals
from frontend.cli.up import main
chairlift.service.signals.REPEAT_S = 60.0  # a busy machine may take longer than a second from one signal to the next
sys.exit(main(sys.argv[2:], [sys.executable, sys.argv[1]]))
"""


class Up:
    """One run of `chairlift up`."""

    def __init__(self, folder: Path, plan: str, flags: list[str]) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        (folder / "plan").write_text(plan)
        self.stderr_path = folder / "stderr"
        with self.stderr_path.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN_UP, str(SCRIPT), "--port", "0", "--http-port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # a process group, as a terminal's foreground job has one
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "SCRIPTED_ENGINE": str(folder),
                    "TMPDIR": str(self.tmp),
                },
            )

    @property
    def starts(self) -> list[dict]:
        """What each start of the engine wrote down."""
        path = self.folder / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def read_until(self, pattern: str) -> re.Match[str]:
        """Reads standard output line by line until one matches."""
        for line in self.process.stdout:
            match = re.search(pattern, line)
            if match is not None:
                return match
        raise AssertionError(f"no line matches {pattern!r}; stderr:\n{self.stderr}")

    def wait_serving(self) -> str:
        """Returns the address."""
        return self.read_until(r"serving on (\S+)")[1]

    def go_on(self) -> None:
        """Lets an engine go on that holds its first answer."""
        (self.folder / "go").touch()

    def end(self) -> tuple[int, str]:
        """Waits for the end; returns the exit status and the rest of standard output."""
        rest, _ = self.process.communicate()
        return self.process.returncode, rest

    def assert_nothing_left(self) -> None:
        for start in self.starts:
            wait_gone(start["pid"])
        assert list(self.tmp.iterdir()) == []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_draining(client: Client) -> None:
    """Until new calls are refused."""
    with contextlib.suppress(GenerationError):
        while True:
            client.get_model()


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


@pytest.fixture
def start_up():
    """Makes runs; whatever they leave behind is killed at the end."""
    runs: list[Up] = []
    with tempfile.TemporaryDirectory(prefix="up-") as root:  # a short path: the socket lies below it

        def start(plan: str, *flags: str) -> Up:
            folder = Path(root) / str(len(runs))
            folder.mkdir()
            runs.append(Up(folder, plan, list(flags)))
            return runs[-1]

        yield start
        for run in runs:
            run.process.kill()
            run.process.wait()
            run.process.stdout.close()
            for start_record in run.starts:
                if is_running(start_record["pid"]):
                    os.kill(start_record["pid"], signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_leaves_nothing_behind(start_up, number):
    up = start_up("hold")
    with Client(up.wait_serving()) as client:
        stream = client.stream("x" * 30)
        texts = [next(stream).text]
        os.killpg(up.process.pid, number)  # as Ctrl-C does: the engine must not be in the group
        wait_draining(client)
        up.go_on()
        texts += [chunk.text for chunk in stream]
    assert "".join(texts) == "x" * 30
    assert up.end() == (0, "drained 1\n")
    assert len(up.starts) == 1
    up.assert_nothing_left()


def test_a_signal_that_comes_from_all_sides_cuts_no_stream(start_up):
    """As SIGTERM to the group of `make run`: make passes on what the group has got already."""
    up = start_up("serve 0.01")
    with Client(up.wait_serving()) as client:
        streams = [client.stream("x" * 60) for _ in range(8)]
        texts = [next(stream).text for stream in streams]
        os.killpg(up.process.pid, signal.SIGTERM)
        wait_draining(client)  # the first has been handled: the two do not become one
        up.process.send_signal(signal.SIGTERM)
        texts = [text + "".join(chunk.text for chunk in stream) for text, stream in zip(texts, streams, strict=True)]
    assert texts == ["x" * 60] * 8
    status, said = up.end()
    assert (status, said[:8]) == (0, "drained ")
    assert "second signal" not in up.stderr
    up.assert_nothing_left()


def test_openais_api_is_served_beside(start_up):
    up = start_up("serve 0.01")
    url = up.read_until(r"OpenAI's API on (\S+)")[1]
    up.wait_serving()
    request = urllib.request.Request(
        url + "/completions", data=b'{"prompt": "abc"}', headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert json.load(answer)["choices"][0]["text"] == "abc"
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == (0, "drained 0\n")
    up.assert_nothing_left()


def test_workers_share_the_ports_and_drain_together(start_up):
    up = start_up("hold", "--workers", "2")
    target = up.wait_serving()
    workers = [int(pid) for pid in Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()]
    assert len(workers) == 3  # and the engine
    with Client(target) as client:
        stream = client.stream("x" * 30)
        texts = [next(stream).text]
        up.process.send_signal(signal.SIGTERM)
        wait_draining(client)  # of the worker that has the stream: a client has one connection
        up.go_on()
        texts += [chunk.text for chunk in stream]
    assert "".join(texts) == "x" * 30
    assert up.end() == (0, "drained 1\n")
    up.assert_nothing_left()
    for pid in workers:
        wait_gone(pid)


def test_second_signal_ends_workers_too(start_up):
    up = start_up("serve 0.01", "--workers", "2", "--no-http")
    with Client(up.wait_serving()) as client:
        stream = client.stream("x", ignore_end_token=True, max_tokens=4000)
        next(stream)
        children = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
        up.process.send_signal(signal.SIGTERM)
        wait_draining(client)
        up.process.send_signal(signal.SIGINT)
        assert up.end() == (130, "")
        assert "second signal: ending at once\n" in up.stderr
        stream.cancel()
    for pid in children:
        wait_gone(int(pid))
    up.assert_nothing_left()


def test_http_can_be_left_out(start_up):
    up = start_up("serve 0.01", "--no-http")
    assert up.process.stdout.readline().startswith("serving on")


def test_second_signal_ends_at_once(start_up):
    up = start_up("serve 0.01")
    with Client(up.wait_serving()) as client:
        stream = client.stream("x", ignore_end_token=True, max_tokens=4000)
        next(stream)
        up.process.send_signal(signal.SIGINT)
        wait_draining(client)
        up.process.send_signal(signal.SIGTERM)  # another one: a second SIGINT so soon would be the first one
        assert up.end() == (128 + signal.SIGTERM, "")
        assert "second signal: ending at once, 1 request cut off" in up.stderr
        stream.cancel()
    up.assert_nothing_left()


def test_flags_of_the_engine_are_forwarded_and_the_socket_is_private(start_up):
    up = start_up(
        "serve", "--max-num-seqs", "8", "--no-enable-prefix-caching", "--log-level", "warning", "--model", "some/model"
    )
    up.wait_serving()
    argv = up.starts[0]["argv"]
    assert argv[:5] == ["--max-num-seqs", "8", "--no-enable-prefix-caching", "--model", "some/model"]
    assert argv[argv.index("--log-level") + 1] == "warning"
    uds = Path(argv[argv.index("--uds") + 1])
    assert uds.parent.parent == up.tmp
    assert uds.parent.stat().st_mode & 0o777 == 0o700


def test_engine_that_dies_is_started_again_with_growing_pauses(start_up):
    up = start_up(f"die 1\nsignal {signal.SIGKILL.value}\nserve")
    with Client(up.wait_serving()) as client:
        assert client.generate("hello").text == "hello"
        assert len(up.starts) == 3
        pids = [str(start["pid"]) for start in up.starts]
        assert re.findall(r"engine started, pid (\d+)$", up.stderr, re.MULTILINE) == pids
        assert up.stderr.count("the engine ended") == 2
        assert "the engine ended: exit status 1; restarting it in 0.5 s" in up.stderr
        assert "the engine ended: killed by SIGKILL; restarting it in 1 s" in up.stderr
        os.kill(up.starts[-1]["pid"], signal.SIGKILL)  # and again, when it has served
        wait_gone(up.starts[-1]["pid"])
    up.process.terminate()
    assert up.end() == (0, "drained 0\n")
    up.assert_nothing_left()


@pytest.mark.slow
def test_twenty_quick_kills_in_a_row_lose_nothing(start_up):
    """Neither pauses between starts nor losses without progress end a stream."""
    up = start_up("serve 0.02", "--failover-timeout", "5")
    with Client(up.wait_serving()) as client:
        streams = [client.stream("x" * 200) for _ in range(4)]
        num_tokens = [next(stream).num_tokens for stream in streams]
        for number in range(20):
            while len(up.starts) <= number:
                time.sleep(0.01)  # for another process's file
            os.kill(up.starts[-1]["pid"], signal.SIGKILL)
            wait_gone(up.starts[-1]["pid"])
            if number % 4:  # else it is killed again while it loads
                num_tokens = [had + next(stream).num_tokens for had, stream in zip(num_tokens, streams, strict=True)]
        for index, stream in enumerate(streams):
            num_tokens[index] += sum(chunk.num_tokens for chunk in stream)
    assert num_tokens == [201] * 4  # the prompt again, and the end token
    assert up.stderr.count("killed by SIGKILL") == 20
    up.process.terminate()
    assert up.end() == (0, "drained 0\n")


def test_engine_that_cannot_run_ends_up_with_its_message_and_status(start_up):
    up = start_up("die 2", "--no-such-flag")
    assert up.end() == (2, "")
    assert "scripted engine: error: this is what must be changed" in up.stderr
    assert len(up.starts) == 1
    up.assert_nothing_left()


def test_engine_ends_when_up_is_killed(start_up):
    up = start_up("serve")
    up.wait_serving()
    up.process.kill()
    up.process.wait()
    wait_gone(up.starts[0]["pid"])


def test_smoke_test_is_streamed_and_shows_example_calls(start_up):
    up = start_up("serve", "--smoke-test", "--uvloop")
    target = up.wait_serving()
    up.read_until("^Once upon a time$")  # the fake engine's answer is the prompt
    up.read_until("generate .* --max-tokens 64")
    up.read_until("generate --chat")
    up.read_until(rf'Client\("{target}"\)')
    up.read_until(rf"grpcurl -plaintext .* {target} chairlift\.v1\.GenerationService/StreamGenerate")
    up.read_until("Ctrl-C")
    up.process.terminate()
    assert up.end() == (0, "drained 0\n")


def test_smoke_test_has_the_key_and_does_not_print_it(start_up, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("the-key\n")
    up = start_up("serve", "--proof", "--api-key-file", str(keys))
    target = up.wait_serving()
    up.read_until("^Once upon a time$")
    up.read_until("with the key in CHAIRLIFT_API_KEY")
    up.read_until(rf'grpcurl -plaintext -H "authorization: Bearer \$CHAIRLIFT_API_KEY" .* {target}')
    up.read_until("Ctrl-C")
    up.process.terminate()
    assert up.end() == (0, "drained 0\n")
    assert "the-key" not in up.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-queued-requests", "0"], "chairlift up: error: --max-queued-requests is 0, it must be a whole number"),
        (["--port", "many"], "chairlift up: error: --port is many, it must be a whole number"),
        (["--workers", "0"], "chairlift up: error: --workers is 0, it must be a whole number between 1 and 256"),
        (["--workers", "2", "--api-key", "two words"], "chairlift up: error: --api-key: a key has 1 to 1024 printable"),
        (["--host", "0.0.0.0"], "chairlift up: error: --host 0.0.0.0 is open to other machines"),
        (
            ["--smoke-test", "--tls-cert", "c", "--tls-key", "k"],
            "chairlift up: error: --smoke-test does not support TLS: add --no-smoke-test",
        ),
        (["--tls-cert", "c", "--tls-key", "k"], "chairlift up: error: --tls-cert c cannot be read"),
        (["--api-key", "two words"], "chairlift up: error: --api-key: a key has 1 to 1024 printable"),
        (["--engine", "127.0.0.1:1"], "chairlift up: error: --engine: `up` starts its own engine"),
    ],
)
def test_bad_flag_is_one_line_and_status_2(start_up, flags, says):
    up = start_up("serve", *flags)
    assert up.end() == (2, "")
    assert up.stderr.startswith(says)
    assert up.stderr.count("\n") == 1
    assert up.starts == []


def test_port_in_use_is_said_before_the_engine_is_started(start_up):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = start_up("serve", "--port", str(taken.getsockname()[1]))
        assert up.end() == (2, "")
    assert "choose another --port" in up.stderr
    assert up.starts == []
    up.assert_nothing_left()
