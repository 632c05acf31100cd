"""Runs `chairlift up` as a process, with a scripted program instead of the engine."""

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
from typing import IO

import pytest

from chairlift import Client, GenerationError, GenerationStream
from frontend.cli import up as up_command
from frontend.cli.smoke_test import next_steps
from tests.hang import HANG_S
from tests.support.processes import child_pids, is_alive, kill, wait_gone

SCRIPT = Path(__file__).with_name("scripted_engine.py")
OF_A_CALL_CANCELLED_AT_ONCE = re.compile(
    r'Traceback .*\n  File "src/python/grpcio/.* in grpc\._cython\.cygrpc\._schedule_rpc_coro\n.*CancelledError\n'
)
"""What grpc itself prints if a client cancels a call before it begins, as a signal may cancel the smoke test."""
RUN_UP = """\
import sys
import chairlift.service.signals
from frontend.cli.up import main
chairlift.service.signals.REPEAT_S = 60.0  # on a busy machine, more than a second may pass between two signals
sys.exit(main(sys.argv[2:], [sys.executable, sys.argv[1]]))
"""


class Up:
    """One run of `chairlift up`."""

    def __init__(self, folder: Path, plan: str, flags: list[str], stdout: int | IO[str]) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        (folder / "plan").write_text(plan)
        self.stderr_path = folder / "stderr"
        with self.stderr_path.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN_UP, str(SCRIPT), "--port", "0", *flags],
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,  # its own process group, like a terminal's foreground job
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "SCRIPTED_ENGINE": str(folder),
                    "TMPDIR": str(self.tmp),
                },
            )

    @property
    def starts(self) -> list[dict]:
        """Returns what each start of the engine recorded."""
        path = self.folder / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def read_until(self, pattern: str) -> re.Match[str]:
        """Reads standard output up to the first line that matches the pattern."""
        for line in self.process.stdout:
            match = re.search(pattern, line)
            if match is not None:
                return match
        raise AssertionError(f"no line matches {pattern!r}; stderr:\n{self.stderr}")

    def wait_serving(self) -> str:
        """Returns the address."""
        return self.read_until(r"serving on (\S+)")[1]

    def go_on(self) -> None:
        """Lets an engine with the plan `hold` continue."""
        (self.folder / "go").touch()

    def end(self) -> tuple[int, str]:
        """Waits until the process ends; returns its exit status and the rest of standard output."""
        rest, _ = self.process.communicate()
        return self.process.returncode, rest

    def assert_nothing_left(self) -> None:
        for start in self.starts:
            wait_gone(start["pid"])
        assert list(self.tmp.iterdir()) == []


def wait_draining(client: Client) -> None:
    """Waits until new calls are refused."""
    with contextlib.suppress(GenerationError):
        while True:
            client.get_model()


def drained(up: Up, client: Client, stream: GenerationStream) -> list[str]:
    """Drains a server whose engine holds the rest of an answer, then lets it go on; returns the texts of that rest."""
    up.process.send_signal(signal.SIGTERM)
    wait_draining(client)
    up.go_on()
    return [chunk.text for chunk in stream]


@pytest.fixture
def start_up():
    """start(plan, *flags): runs `chairlift up`; processes left at the end are killed."""
    runs: list[Up] = []
    with tempfile.TemporaryDirectory(prefix="up-") as root:  # a short path: the socket lies below it

        def start(plan: str, *flags: str, stdout: int | IO[str] = subprocess.PIPE) -> Up:
            folder = Path(root) / str(len(runs))
            folder.mkdir()
            runs.append(Up(folder, plan, list(flags), stdout))
            return runs[-1]

        yield start
        for run in runs:
            run.process.kill()
            run.process.wait()
            if run.process.stdout is not None:
                run.process.stdout.close()
            for start_record in run.starts:
                if is_alive(start_record["pid"]):
                    kill(start_record["pid"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_drains_even_if_it_comes_twice_and_leaves_nothing_behind(start_up, number):
    """`make run` passes a signal on that the whole process group, like after Ctrl-C, has already received."""
    up = start_up("hold", "--no-http")
    with Client(up.wait_serving()) as client:
        stream = client.stream("x" * 30)
        texts = [next(stream).text]
        os.killpg(up.process.pid, number)  # the engine must not be in the group
        wait_draining(client)  # the first signal has been handled
        up.process.send_signal(number)
        up.go_on()
        texts += [chunk.text for chunk in stream]
    assert "".join(texts) == "x" * 30
    assert up.end() == (0, "drained 1\n")
    assert "second signal" not in up.stderr
    assert len(up.starts) == 1
    up.assert_nothing_left()


@pytest.mark.parametrize("flags", [(), ("--smoke-test",)])
def test_a_full_disk_under_stdout_does_not_keep_it_from_draining(start_up, flags):
    with Path("/dev/full").open("w") as full:
        up = start_up("hold", "--no-http", *flags, stdout=full)
    deadline = time.monotonic() + HANG_S
    while (listening := re.search(r"listening on (\S+), engine", up.stderr)) is None:
        assert time.monotonic() < deadline, up.stderr
        time.sleep(0.01)
    with Client(listening[1]) as client:
        texts = []
        while not texts:
            with contextlib.suppress(GenerationError):  # it does not serve yet
                stream = client.stream("x" * 30)
                texts.append(next(stream).text)
        assert "".join((*texts, *drained(up, client, stream))) == "x" * 30
    assert up.process.wait() == 0
    assert "Traceback" not in up.stderr
    up.assert_nothing_left()


@pytest.mark.parametrize("flags", [(), ("--smoke-test",)])
def test_end_of_what_reads_stdout_does_not_keep_it_from_draining(start_up, flags):
    """`make run | head`, or `| tee`, which Ctrl-C ends first."""
    up = start_up("hold", "--no-http", *flags)
    target = up.wait_serving()
    up.process.stdout.close()
    with Client(target) as client:
        stream = client.stream("x" * 30)
        texts = [next(stream).text]
        assert "".join((*texts, *drained(up, client, stream))) == "x" * 30
    assert up.process.wait() == 0
    assert "Traceback" not in OF_A_CALL_CANCELLED_AT_ONCE.sub("", up.stderr)
    up.assert_nothing_left()


def test_workers_share_the_ports_and_drain_together(start_up):
    up = start_up("hold", "--workers", "2", "--no-http")
    target = up.wait_serving()
    workers = child_pids(up.process.pid)
    assert len(workers) == 3  # and the engine
    with Client(target) as client:
        stream = client.stream("x" * 30)
        texts = [next(stream).text]
        # Waits for the worker with the stream: a client has one connection.
        assert "".join((*texts, *drained(up, client, stream))) == "x" * 30
    assert up.end() == (0, "drained 1\n")
    up.assert_nothing_left()
    for pid in workers:
        wait_gone(pid)


def test_second_signal_ends_workers_too(start_up):
    up = start_up("serve 0.01", "--workers", "2", "--no-http")
    with Client(up.wait_serving()) as client:
        stream = client.stream("x", ignore_end_token=True, max_tokens=4000)
        next(stream)
        children = child_pids(up.process.pid)
        up.process.send_signal(signal.SIGTERM)
        wait_draining(client)
        up.process.send_signal(signal.SIGINT)
        assert up.end() == (130, "")
        assert "second signal: ending at once\n" in up.stderr
        stream.cancel()
    for pid in children:
        wait_gone(pid)
    up.assert_nothing_left()


def test_second_signal_ends_at_once(start_up):
    up = start_up("serve 0.01", "--no-http")
    assert up.process.stdout.readline().startswith("serving on"), "no line about OpenAI's API with --no-http"
    (target,) = re.findall(r"listening on (127\S+),", up.stderr)
    with Client(target) as client:
        stream = client.stream("x", ignore_end_token=True, max_tokens=4000)
        next(stream)
        up.process.send_signal(signal.SIGINT)
        wait_draining(client)
        up.process.send_signal(signal.SIGTERM)  # a second SIGINT so soon would count as a repetition of the first
        assert up.end() == (128 + signal.SIGTERM, "")
        assert "second signal: ending at once, 1 request cut off" in up.stderr
        stream.cancel()
    up.assert_nothing_left()


def test_pair_serves_both_apis_and_forwards_flags_and_shows_example_calls(start_up, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("the-key\n")
    engine_flags = ["--max-num-seqs", "8", "--served-model-name", "a", "b", "--model", "some/model"]
    frontend_flags = ["--http-port", "0", "--api-key-file", str(keys), "--log-level", "warning", "--uvloop"]
    up = start_up("serve", "--smoke-test", *engine_flags, *frontend_flags)
    url = up.read_until(r"OpenAI's API on (\S+)")[1]
    target = up.wait_serving()
    up.read_until("^Once upon a time$")  # the fake engine answers with the prompt
    up.read_until("with the key in CHAIRLIFT_API_KEY")
    up.read_until("generate .* --max-tokens 64")
    up.read_until(rf'grpcurl -plaintext -H "authorization: Bearer \$CHAIRLIFT_API_KEY" .* {target}')
    up.read_until("Ctrl-C")
    headers = {"content-type": "application/json", "authorization": "Bearer the-key"}
    request = urllib.request.Request(url + "/completions", data=b'{"prompt": "abc"}', headers=headers)
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        assert json.load(answer)["choices"][0]["text"] == "abc"
    argv = up.starts[0]["argv"]
    assert argv[:7] == engine_flags
    assert argv[argv.index("--log-level") + 1] == "warning"
    uds = Path(argv[argv.index("--uds") + 1])
    assert uds.parent.parent == up.tmp
    assert uds.parent.stat().st_mode & 0o777 == 0o700
    up.process.terminate()
    assert up.end() == (0, "drained 0\n")
    assert "the-key" not in up.stderr
    up.assert_nothing_left()


def test_example_calls_name_the_address_and_suit_the_model():
    lines = next_steps("127.0.0.1:7", True, with_key=False)
    assert re.search('generate "Once upon a time" --max-tokens 64 --target 127.0.0.1:7$', lines, re.MULTILINE)
    assert re.search("generate --chat .* --target 127.0.0.1:7$", lines, re.MULTILINE)
    assert 'Client("127.0.0.1:7")' in lines
    assert re.search(r"grpcurl -plaintext -d .* 127.0.0.1:7 chairlift\.v1\.GenerationService/StreamGenerate$", lines)
    assert "key" not in lines
    assert "--chat" not in next_steps("127.0.0.1:7", False, with_key=False)


def test_engine_that_dies_is_restarted(start_up):
    up = start_up("die 1\nserve", "--no-http")
    with Client(up.wait_serving()) as client:
        assert client.generate("hello").text == "hello"
        pids = [str(start["pid"]) for start in up.starts]
        assert re.findall(r"engine started, pid (\d+)$", up.stderr, re.MULTILINE) == pids
        assert len(pids) == 2
        assert "the engine ended: exit status 1; restarting it in 0.5 s" in up.stderr
        os.kill(int(pids[1]), signal.SIGKILL)
        wait_gone(int(pids[1]))
    up.process.terminate()
    assert up.end() == (0, "drained 0\n")
    up.assert_nothing_left()


@pytest.mark.slow
def test_streams_survive_twenty_kills_in_quick_succession(start_up):
    """Neither pauses between starts nor losses without progress end a stream."""
    up = start_up("serve 0.02", "--failover-timeout", "5", "--no-http")
    with Client(up.wait_serving()) as client:
        streams = [client.stream("x" * 200) for _ in range(4)]
        num_tokens = [next(stream).num_tokens for stream in streams]
        for number in range(20):
            while len(up.starts) <= number:
                time.sleep(0.01)  # until another process writes its file
            os.kill(up.starts[-1]["pid"], signal.SIGKILL)
            wait_gone(up.starts[-1]["pid"])
            if number % 4:  # otherwise the next kill hits the engine while it loads
                num_tokens = [had + next(stream).num_tokens for had, stream in zip(num_tokens, streams, strict=True)]
        for index, stream in enumerate(streams):
            num_tokens[index] += sum(chunk.num_tokens for chunk in stream)
    assert num_tokens == [201] * 4  # the prompt repeated, and the end token
    assert up.stderr.count("killed by SIGKILL") == 20
    up.process.terminate()
    assert up.end() == (0, "drained 0\n")


def test_engine_with_a_configuration_error_ends_up_with_its_message_and_status(start_up):
    up = start_up("die 2", "--no-such-flag", "--no-http")
    assert up.end() == (2, "")
    assert "scripted engine: error: this is what must be changed" in up.stderr
    assert len(up.starts) == 1
    up.assert_nothing_left()


def test_engine_ends_when_up_is_killed(start_up):
    up = start_up("serve", "--no-http")
    up.wait_serving()
    up.process.kill()
    up.process.wait()
    wait_gone(up.starts[0]["pid"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-queued-requests", "0"], "--max-queued-requests is 0, it must be a whole number"),
        (["--port", "many"], "--port is many, it must be a whole number"),
        (["--workers", "0"], "--workers is 0, it must be a whole number between 1 and 256"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to other machines"),
        (
            ["--smoke-test", "--tls-cert", "c", "--tls-key", "k"],
            "--smoke-test does not support TLS: add --no-smoke-test",
        ),
        (["--engine", "127.0.0.1:1"], "--engine: `up` starts its own engine"),
    ],
)
def test_invalid_flag_is_one_line_and_status_2(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        up_command.main(flags, ["/no/engine"])
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"chairlift up: error: {message}")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "c", "--tls-key", "k"], "--tls-cert c cannot be read"),
        (["--workers", "2", "--api-key", "two words"], "--api-key: a key has 1 to 1024 printable"),
    ],
)
def test_setting_that_cannot_be_used_is_one_line_and_status_2_before_the_engine_starts(start_up, flags, message):
    up = start_up("serve", "--no-http", *flags)
    assert up.end() == (2, "")
    assert up.stderr.startswith(f"chairlift up: error: {message}")
    assert up.stderr.count("\n") == 1
    assert up.starts == []
    up.assert_nothing_left()


def test_port_in_use_is_reported_before_the_engine_starts(start_up):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = start_up("serve", "--no-http", "--port", str(taken.getsockname()[1]))
        assert up.end() == (2, "")
    assert "choose another --port" in up.stderr
    assert up.starts == []
    up.assert_nothing_left()
