"""Notifications to a service manager."""

import socket
from pathlib import Path

import pytest

from engine.startup.service_manager import notify_ready


@pytest.mark.parametrize("is_abstract", [False, True])
def test_ready_is_sent_once_with_the_instance_id(tmp_path: Path, is_abstract: bool) -> None:
    name = f"@{tmp_path}/notify" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
        manager.bind(name.replace("@", "\0") if is_abstract else name)
        notify_ready("abc", {"NOTIFY_SOCKET": name})
        assert manager.recv(1000) == b"READY=1\nX_INSTANCE_ID=abc"
        with pytest.raises(BlockingIOError):
            manager.recv(1000)


def test_nothing_is_sent_or_logged_without_a_service_manager(caplog: pytest.LogCaptureFixture) -> None:
    notify_ready("abc", {})
    assert not caplog.messages


def test_a_manager_that_has_gone_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notify_ready("abc", {"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert caplog.messages == [f"Cannot notify the service manager at {tmp_path / 'gone'}: No such file or directory"]
