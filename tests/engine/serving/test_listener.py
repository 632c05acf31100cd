"""Addresses: which can be bound, who may reach them, and errors for the others."""

import socket
import stat
from pathlib import Path

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.errors import ConfigError
from engine.serving.listener import Listener
from engine.serving.server import EngineService
from tests.support.engine.client import AttachClient, engine_status, submission
from tests.support.engine.fake_engine import fake_engine_parts, run_engine


async def test_port_zero_picks_a_free_one() -> None:
    listener = Listener(EngineService(), "127.0.0.1:0")
    await listener.start()
    try:
        assert not listener.address.endswith(":0")
        assert (await engine_status(listener.address)).status.state == pb.ENGINE_STATE_LOADING
    finally:
        await listener.stop(0)


async def test_a_port_in_use_is_a_config_error_also_for_another_engine() -> None:
    first = Listener(EngineService(), "127.0.0.1:0")
    await first.start()
    second = Listener(EngineService(), first.address)
    try:
        with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use; .*--port"):
            await second.start()
    finally:
        await second.stop(0)
        await first.stop(0)


async def test_a_unix_socket_serves_only_its_owner_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    async with run_engine(fake_engine_parts(), f"unix:{path}") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with AttachClient.open(server.address) as client:
            (answer,) = await client.generate(submission(1, [1], 4))
            assert answer.completion is not None
    assert not path.exists()


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with run_engine(fake_engine_parts(), f"unix:{path}") as server:
        assert (await engine_status(server.address)).status.state == pb.ENGINE_STATE_SERVING


async def test_a_socket_with_a_listener_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        listener = Listener(EngineService(), f"unix:{path}")
        with pytest.raises(ConfigError, match="another process listens"):
            await listener.start()
        await listener.stop(0)
        assert path.exists()


async def test_a_socket_without_permission_to_connect_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another user's, and perhaps served."""

    def connect(_self: socket.socket, _address: str) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    monkeypatch.setattr("engine.serving.listener.socket.socket.connect", connect)
    listener = Listener(EngineService(), f"unix:{path}")
    with pytest.raises(ConfigError, match=r"cannot listen on --uds .*Permission denied"):
        await listener.start()
    await listener.stop(0)
    assert path.exists()


async def test_a_folder_that_may_not_be_entered_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_dir(_self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("engine.serving.listener.Path.is_dir", is_dir)
    listener = Listener(EngineService(), f"unix:{tmp_path / 'engine.sock'}")
    with pytest.raises(ConfigError, match=r"cannot listen on --uds .*Permission denied"):
        await listener.start()
    await listener.stop(0)


async def test_a_stale_socket_that_cannot_be_removed_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(_self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    monkeypatch.setattr("engine.serving.listener.Path.unlink", unlink)
    listener = Listener(EngineService(), f"unix:{path}")
    with pytest.raises(ConfigError, match=r"cannot listen on --uds .*Permission denied"):
        await listener.start()
    await listener.stop(0)


@pytest.mark.parametrize(
    ("name", "words"),
    [("file", "exists and is not a socket"), ("missing/x", "missing does not exist"), ("x" * 120, "at most 107")],
)
async def test_impossible_paths_are_explained(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").touch()
    listener = Listener(EngineService(), f"unix:{tmp_path / name}")
    with pytest.raises(ConfigError, match=words):
        await listener.start()
    await listener.stop(0)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("1.2.3.4:0", "Cannot assign requested address"),
        (
            "no.such.invalid:0",
            "(Name or service not known|Temporary failure in name resolution)",
        ),  # or no DNS
    ],
)
async def test_an_invalid_address_is_reported_once(
    address: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {address}: {reason}; choose another --host"):
        await Listener(EngineService(), address).start()
    assert capfd.readouterr().err == ""
