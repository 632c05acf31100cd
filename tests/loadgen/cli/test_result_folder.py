"""A folder is left behind only with results in it."""

from pathlib import Path

import pytest

from loadgen.cli.result_folder import part_of_results, result_folder
from loadgen.errors import ResultError, TargetError


def test_a_folder_that_stays_empty_goes_again_with_those_made_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(TargetError), result_folder(folder, "run"):
        _fail_in(folder)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_no_empty_folder_either(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        result_folder(tmp_path / "all", "ab") as folder,
        part_of_results(folder / "a-1"),
    ):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_stays_whatever_happens(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    with (
        pytest.raises(TargetError),
        result_folder(folder, "ab"),
        part_of_results(folder / "a-1"),
        part_of_results(folder / "b-1"),
    ):
        _fail_in(folder / "b-1", leaving=folder / "a-1" / "run.json")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [
        Path("all"),
        Path("all/a-1"),
        Path("all/a-1/run.json"),
    ]


def test_an_empty_folder_of_the_user_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with result_folder(tmp_path / "mine", "run"):
        pass
    assert (tmp_path / "mine").is_dir()


def test_without_a_name_it_is_called_after_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with result_folder(None, "replay") as folder:
        assert folder.parent == Path("loadgen-results")
        assert folder.name.startswith("replay-")


def test_another_run_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ResultError, match="is not empty"), result_folder(tmp_path, "run"):
        pass
    assert (tmp_path / "run.json").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ResultError, match=r"--result-dir .*file/out: Not a directory"),
        result_folder(tmp_path / "file" / "out", "run"),
    ):
        pass


def _fail_in(folder: Path, leaving: Path | None = None) -> None:
    assert folder.is_dir()
    if leaving is not None:
        leaving.write_text("{}")
    raise TargetError("no server answers")
