"""Other systems than Linux are refused by both programs that need it, in one line."""

import sys

import pytest

import engine.__main__
import frontend.cli.up


@pytest.mark.parametrize("main", [engine.__main__.main, frontend.cli.up.main], ids=["engine", "up"])
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused_in_a_line_that_says_what_to_do(main, system, monkeypatch, capfd):
    monkeypatch.setattr(sys, "platform", system)
    assert main([]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert f"run on Linux, this is {system}" in lines[0]
    assert "docker compose up" in lines[0]
