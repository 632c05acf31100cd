"""Programs that are started with closed standard streams."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hang import HANG_S

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
CLOSED = [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"]
REPORT = """\
import os, socket, sys
from chairlift.service.standard_streams import open_closed_streams
open_closed_streams()
print("out"), print("err", file=sys.stderr)
with socket.socket() as other, open(sys.argv[1], "w") as file:
    print([sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno()], other.fileno() > 2, file=file)
"""

STARTER = """\
import subprocess, sys
from chairlift.service.standard_streams import open_closed_streams
open_closed_streams()
code = "import sys; print(None in (sys.stdin, sys.stdout, sys.stderr), file=open(sys.argv[1], 'w'))"
subprocess.run([sys.executable, "-c", code, sys.argv[1]], check=True)
"""


def status(closed: str, *command: object) -> int:
    """Runs a command with closed streams; returns its exit status."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *map(str, command)]
    return subprocess.run(shell, env=ENVIRONMENT, capture_output=True, timeout=HANG_S, check=False).returncode


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_streams_have_their_own_descriptors(closed: str, tmp_path: Path) -> None:
    assert status(closed, sys.executable, "-c", REPORT, tmp_path / "report") == 0
    assert (tmp_path / "report").read_text() == "[0, 1, 2] True\n"


@pytest.mark.parametrize("closed", CLOSED)
def test_processes_that_are_started_have_open_streams(closed: str, tmp_path: Path) -> None:
    """Workers, ranks of an engine and compilers do not open them themselves."""
    assert status(closed, sys.executable, "-c", STARTER, tmp_path / "report") == 0
    assert (tmp_path / "report").read_text() == "False\n"


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize(
    "command", [["-m", "frontend", "--no-http"], ["-m", "frontend.cli.main", "up", "--no-http"], ["-m", "engine"]]
)
def test_each_server_says_with_its_status_what_is_wrong(command: Sequence[str], closed: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert status(closed, sys.executable, *command, "--port", taken.getsockname()[1]) == 2


@pytest.mark.parametrize("closed", ["", *CLOSED])
def test_commands_do_not_need_what_they_print_to(closed: str) -> None:
    assert status(closed, sys.executable, "-m", "frontend.cli.main", "--help") == 0
