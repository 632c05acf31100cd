"""Tests of `chairlift health`."""

import asyncio
import os
import subprocess
import sys

import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from frontend.cli.main import main
from tests.support.frontend.fake_engine import FakeEngine


def run(target):
    return asyncio.to_thread(main, ["health", "--target", target])


async def test_serving_with_model_and_limits(target, capsys):
    assert await run(target) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["SERVING", "model: fake", "max_model_len: 4096 tokens"]


async def test_all_names_of_the_model_are_shown(make_pair, capsys):
    pair = await make_pair(engine=FakeEngine(aliases=["a", "b"]))
    assert await run(f"127.0.0.1:{pair.app.port}") == 0
    assert capsys.readouterr().out.splitlines()[1] == "model: fake, a, b"


async def test_not_serving_while_the_engine_loads(target, engine, capsys):
    engine.set_state(engine_pb.ENGINE_STATE_LOADING)
    while await run(target) == 0:  # until the frontend has received the state
        capsys.readouterr()
    assert capsys.readouterr().out == "NOT_SERVING\n"


@pytest.mark.parametrize("timeout", ["inf", "nan", "-1", "0", "x"])
def test_a_timeout_that_no_wait_can_have_is_refused(timeout, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["health", f"--timeout={timeout}"])
    assert caught.value.code == 2
    assert f"--timeout is {timeout}, it must be above 0" in capsys.readouterr().err


async def test_unreachable_server(capsys):
    assert await run("127.0.0.1:1") == 1
    out, err = capsys.readouterr()
    assert out == "NOT_SERVING\n"
    assert err.startswith("chairlift health: UNAVAILABLE")
    assert err.count("\n") == 1


async def test_without_a_key_the_state_and_the_key_variable_are_shown(make_pair, capsys, monkeypatch):
    pair = await make_pair(api_key=("the-key",))
    target = f"127.0.0.1:{pair.app.port}"
    assert await run(target) == 0
    assert capsys.readouterr().out == "SERVING\nmodel: hidden without an API key, see CHAIRLIFT_API_KEY\n"
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "the-key")
    assert await run(target) == 0
    assert "model: fake" in capsys.readouterr().out


async def test_over_tls(make_pair, make_authority, capsys):
    authority = make_authority("ours")
    served = authority.sign("server")
    pair = await make_pair(tls_cert=served.cert, tls_key=served.key)
    flags = ["health", "--target", f"127.0.0.1:{pair.app.port}", "--tls-ca", str(authority.ca)]
    assert await asyncio.to_thread(main, flags) == 0
    assert "model: fake" in capsys.readouterr().out


async def test_closed_output_ends_the_command_quietly(target):
    reader, writer = os.pipe()
    os.close(reader)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend.cli.main", "health", "--target", target),
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    os.close(writer)
    _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"")


async def test_engine_shows_its_state_model_and_load(engine, capsys):
    flags = ["health", "--engine", engine.address]
    assert await asyncio.to_thread(main, flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["SERVING", "model: fake", "max_model_len: 4096 tokens"]
    assert lines[-1] == "running: 0, waiting: 0"
    engine.set_state(engine_pb.ENGINE_STATE_LOADING)
    assert await asyncio.to_thread(main, flags) == 1
    assert capsys.readouterr().out.startswith("LOADING\n")


async def test_unreachable_engine(capsys):
    assert await asyncio.to_thread(main, ["health", "--engine", "127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("NOT_SERVING\n", 1)
