"""The load that tests are tried beside: it ends with the command, whose status it returns."""

import subprocess
import sys
from pathlib import Path

from tests.hang import HANG_S

BUSY = Path(__file__).parents[1] / ".ci" / "busy.py"


def run(*arguments):
    return subprocess.run([sys.executable, BUSY, *arguments], capture_output=True, text=True, timeout=HANG_S)


def children_of(parent):
    """Command lines of its processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_it_computes_beside_the_command_and_ends_with_it(tmp_path):
    """Its output is a pipe that every process of the load holds open: `run` returns when none is left."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.getppid(), flush=True); sys.stdin.read()")
    process = subprocess.Popen(
        [sys.executable, BUSY, "--processes", "2", "--short", "0", "--", sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    parent = int(process.stdout.readline())
    assert parent == process.pid
    assert sum("x * 1.0000001" in command for command in children_of(parent)) == 2
    process.communicate("", timeout=HANG_S)
    assert process.returncode == 0


def test_it_freezes_the_command_and_its_children_and_lets_them_continue(tmp_path):
    """The command ends when it has seen its child stopped and running again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "stat = pathlib.Path(f'/proc/{child.pid}/stat')\n"
        "is_stopped = lambda: stat.read_text().rpartition(')')[2].split()[0] == 'T'\n"
        "while not is_stopped(): time.sleep(0.01)\n"
        "while is_stopped(): time.sleep(0.01)\n"
        "child.communicate()\n"
    )
    assert run("--processes", "0", "--short", "0", "--freeze", "0.5", "--", sys.executable, script).returncode == 0


def test_the_status_is_the_commands():
    assert run("--processes", "1", "--short", "1", "--", "sh", "-c", "exit 3").returncode == 3


def test_a_command_that_is_not_there_is_named():
    result = run("--processes", "1", "--short", "0", "--", "no-such-command")
    assert result.returncode == 2
    assert "no-such-command: no such command" in result.stderr
