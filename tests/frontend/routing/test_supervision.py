"""Writing and reading the notes of an engine's supervisor."""

from pathlib import Path

import pytest

from frontend.routing.supervision import EngineEnd, SupervisorNote, note_path, read_note, write_note


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = note_path(tmp_path / "engine.sock")
    note = SupervisorNote(12.5, {"a": EngineEnd.KILLED, "b": EngineEnd.FAILED})
    write_note(path, SupervisorNote())
    write_note(path, note)
    assert read_note(path) == note
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"restart_until_s": 1, "ends": {"a": "else"}}', '{"ends": 3}'])
def test_unreadable_note_counts_as_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "note").write_text(text)
    assert read_note(tmp_path / "note") is None
    assert read_note(tmp_path / "missing") is None
