"""Tests of the lines about an address without an engine."""

import logging

from frontend.routing.connection_log import MAX_CAUSES, ConnectionLog, EngineLostError


def notes(caplog, causes):
    """Notes these causes; returns the levels of the lines."""
    caplog.set_level(logging.DEBUG)
    log = ConnectionLog(logging.getLogger("test"), "unix:/engine.sock", was_found=False)
    for cause in causes:
        log.note(EngineLostError(cause), was_attached=False)
        log.check_integrity()
    return [record.levelname for record in caplog.records]


def test_each_cause_is_logged_once(caplog):
    assert notes(caplog, ["a", "b", "a", "b", "a"]) == ["WARNING", "WARNING", "DEBUG", "DEBUG", "DEBUG"]


def test_causes_that_differ_at_every_attempt_are_not_all_remembered(caplog):
    causes = [f"the engine reports: {i} blocks are free" for i in range(3 * MAX_CAUSES)]
    assert set(notes(caplog, causes)) == {"WARNING"}


def test_a_cause_is_logged_once_beside_others(caplog):
    others = [str(i) for i in range(MAX_CAUSES - 1)]
    assert notes(caplog, ["a", *others, "a"])[-1] == "DEBUG"
