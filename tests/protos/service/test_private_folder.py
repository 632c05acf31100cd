"""Tests of folders whose processes may be killed: real processes hold the locks."""

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chairlift.service import private_folder
from chairlift.service.private_folder import LOCK_NAME, PrivateFolder, remove_abandoned

OWNER = """
import sys
from chairlift.service.private_folder import PrivateFolder
folder = PrivateFolder("test-", sys.argv[1])
(folder.path / "deep").mkdir()
(folder.path / "deep" / "file").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""
HOLDER = """
import sys
from pathlib import Path
from chairlift.service.private_folder import hold_folder
hold_folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


class Process:
    """A program that prints a line and runs until it is killed."""

    def __init__(self, program: str, argument: Path) -> None:
        command = (sys.executable, "-c", program, str(argument))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline().strip()

    def kill(self) -> None:
        """Kills it as `kill -9` does."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def run() -> Iterator[Callable[[str, Path], Process]]:
    processes: list[Process] = []

    def start(program: str, argument: Path) -> Process:
        processes.append(Process(program, argument))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def abandoned(root: Path, name: str = "chairlift-test-abandoned") -> Path:
    """Makes a folder as a killed process leaves it."""
    folder = root / name
    folder.mkdir(mode=0o700)
    (folder / LOCK_NAME).touch()
    return folder


def test_folder_of_a_killed_process_is_removed_by_the_next_one(
    tmp_path: Path, run: Callable[[str, Path], Process], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    owner = run(OWNER, tmp_path)
    left = Path(owner.line)
    owner.kill()
    assert (left / "deep" / "file").exists()
    new = PrivateFolder("test-", str(tmp_path))
    assert list(tmp_path.iterdir()) == [new.path]
    assert caplog.messages == [f"removed 1 folder(s) that killed processes left in {tmp_path}: {left.name}"]
    new.remove()


def test_folder_of_a_running_process_stays(tmp_path: Path, run: Callable[[str, Path], Process]) -> None:
    owner = run(OWNER, tmp_path)
    remove_abandoned(tmp_path)
    assert (Path(owner.line) / "deep" / "file").exists()


def test_folder_stays_while_another_process_holds_it(tmp_path: Path, run: Callable[[str, Path], Process]) -> None:
    owner = run(OWNER, tmp_path)
    left = Path(owner.line)
    holder = run(HOLDER, left)
    owner.kill()
    remove_abandoned(tmp_path)
    assert left.exists()
    holder.kill()
    remove_abandoned(tmp_path)
    assert not left.exists()


def test_folder_is_private_and_removed_with_its_lock(tmp_path: Path) -> None:
    folder = PrivateFolder("test-", str(tmp_path))
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.path.iterdir()] == [LOCK_NAME]
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_lock_file_is_never_seen_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, could_lock = Path.rename, []

    def lock_first(path: Path, target: Path) -> Path:
        with path.open("r+") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                could_lock.append(True)
            except BlockingIOError:
                could_lock.append(False)
        remove_abandoned(tmp_path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", lock_first)
    folder = PrivateFolder("test-", str(tmp_path))
    assert could_lock == [False]
    assert (folder.path / LOCK_NAME).exists()
    folder.remove()


def test_folder_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = abandoned(tmp_path)
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: os.getuid() + 1)
    remove_abandoned(tmp_path)
    monkeypatch.undo()
    assert left.exists()
    remove_abandoned(tmp_path)
    assert not left.exists()


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = abandoned(tmp_path / "elsewhere")
    (tmp_path / "chairlift-test-link").symlink_to(target)
    linked_lock = abandoned(tmp_path)
    (linked_lock / LOCK_NAME).unlink()
    (linked_lock / LOCK_NAME).symlink_to(target / LOCK_NAME)
    remove_abandoned(tmp_path)
    assert (tmp_path / "chairlift-test-link").is_symlink()
    assert (target / LOCK_NAME).exists()
    assert linked_lock.exists()


@pytest.mark.parametrize("change", ["no lock file", "others may enter", "another name", "a file"])
def test_other_folders_stay(tmp_path: Path, change: str) -> None:
    left = abandoned(tmp_path, "test-abandoned" if change == "another name" else "chairlift-test-abandoned")
    match change:
        case "no lock file":
            (left / LOCK_NAME).unlink()
        case "others may enter":
            left.chmod(0o711)
        case "a file":
            (left / LOCK_NAME).unlink()
            left.rmdir()
            left.touch()
    remove_abandoned(tmp_path)
    assert left.exists()


def test_without_locks_a_folder_works_and_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(private_folder.fcntl, "flock", unsupported)
    folder = PrivateFolder("test-", str(tmp_path))
    monkeypatch.undo()
    assert list(folder.path.iterdir()) == []
    remove_abandoned(tmp_path)
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()
