"""Tests of the `chairlift` command."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontend.cli.main import COMMANDS, main

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(("argv", "says"), [([], "no command given"), (["surf"], "unknown command 'surf'")])
def test_unknown_command_is_status_2(argv, says, capsys):
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_a_command_of_another_server_is_answered_with_ours(capsys):
    assert main(["serve", "org/model"]) == 2
    assert "did you mean `chairlift up --model MODEL`?" in capsys.readouterr().err


def test_an_interrupt_during_the_imports_is_no_traceback(monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupt)
    assert main(["up"]) == 130


@pytest.mark.parametrize("command", [("health", "--target"), ("health", "--engine"), ("lora", "list", "--target")])
def test_an_interrupt_while_a_server_does_not_answer_is_no_traceback(command):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = subprocess.Popen(
            [sys.executable, "-m", "frontend.cli.main", *command, f"127.0.0.1:{silent.getsockname()[1]}"],
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, error = process.communicate()
    assert (process.returncode, error) == (130, b"")


def test_a_full_disk_under_stdout_is_one_line(monkeypatch, capsys):
    command = SimpleNamespace(main=lambda _arguments: sys.stdout.write("an answer"))
    monkeypatch.setattr("importlib.import_module", lambda _name: command)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["generate"]) == 1
    error = capsys.readouterr().err
    assert error == "chairlift generate: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as raised:
        main([name, "--help"])
    assert raised.value.code == 0
    assert f"usage: chairlift {name}" in capsys.readouterr().out


def test_generate_needs_neither_tokenizers_nor_jinja():
    program = (
        "import sys; import frontend.cli.generate; "
        "sys.exit(bool({'tokenizers', 'jinja2', 'frontend.app'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, env=ENVIRONMENT).returncode == 0
