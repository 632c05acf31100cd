"""The caller of a task: that of its key, or the tenant that a trusted gateway names."""

import contextvars

import pytest

from frontend.access.caller import Caller, current_caller, note_caller
from frontend.errors import InvalidRequest


def noted(*args):
    """Notes a caller in a context of its own and returns what is read there."""

    def run():
        note_caller(*args)
        return current_caller()

    return contextvars.Context().run(run)


def test_nobody_is_the_default():
    assert noted(Caller()) == Caller()


def test_the_key_names_the_caller():
    assert noted(Caller("acme", ("batch",))) == Caller("acme", ("batch",))


@pytest.mark.parametrize("value", ["umbrella", b"umbrella"])
def test_a_trusted_header_replaces_the_tenant_but_not_the_classes(value):
    assert noted(Caller("acme", ("batch",)), [value]) == Caller("umbrella", ("batch",))


@pytest.mark.parametrize("value", ["", "x" * 65, "\u00e4", "a\nb", b"\xff"])
def test_a_bad_tenant_is_refused(value):
    with pytest.raises(InvalidRequest, match="x-gateway-inference-fairness-id must have 1 to 64 printable ASCII"):
        noted(Caller(), [value])


def test_two_tenants_are_refused():
    with pytest.raises(InvalidRequest, match="x-gateway-inference-fairness-id is sent 2 times"):
        noted(Caller(), ["a", "b"])
