"""`chairlift simulate` starts the load generator's verb; its errors carry the name of this command."""

import subprocess
import sys

import pytest

from frontend.cli.main import main


def test_errors_carry_the_name_of_the_command(capsys):
    assert main(["simulate"]) == 2
    assert capsys.readouterr().err == "chairlift simulate: error: --trace FILE is missing\n"


def test_a_missing_extra_is_one_line():
    code = "import sys; sys.modules['numpy'] = None; from frontend.cli.main import main; sys.exit(main(['simulate']))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == "chairlift simulate: numpy is missing; install chairlift[loadgen]\n"


def test_help_lists_the_baselines(capsys):
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: chairlift simulate")
    assert "shortest-timeout" in out
