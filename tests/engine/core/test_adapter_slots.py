"""Places of adapters under random operations, and the errors with their numbers."""

import random

import pytest

from engine.core.adapter_slots import AdapterSlots
from engine.core.request import Adapter
from engine.errors import AdapterNotFound, InvalidRequest, NoFreeAdapterSlot


def listed(slots):
    return [(one.name, one.adapter, one.path) for one in slots]


def test_adapters_of_the_start_have_the_first_places():
    slots = AdapterSlots(3, [("a", b"1"), ("b", b"2")])
    assert listed(slots) == [("a", Adapter(0, b"1"), ""), ("b", Adapter(1, b"2"), "")]
    assert slots.acquire("b") == slots.acquire("b", b"2") == Adapter(1, b"2")
    assert slots.reserve() == 2


def test_an_unknown_adapter_is_invalid_and_one_with_another_digest_not_found():
    slots = AdapterSlots(1, [("a", b"1")])
    with pytest.raises(InvalidRequest, match="adapter is 'b', this engine has 1 others"):
        slots.acquire("b")
    for name, digest in (("a", b"2"), ("b", b"1")):
        with pytest.raises(AdapterNotFound):
            slots.acquire(name, digest)


def test_a_replaced_adapter_keeps_its_place_until_its_last_request_has_ended():
    slots = AdapterSlots(2, [("a", b"1")])
    old = slots.acquire("a")
    assert not slots.add(slots.reserve(), "a", b"2", "path")
    assert slots.acquire("a") == Adapter(1, b"2")
    with pytest.raises(AdapterNotFound):
        slots.acquire("a", b"1")
    with pytest.raises(
        NoFreeAdapterSlot,
        match="--max-loras is 2: 1 adapters are loaded, 0 are being loaded, and 1 were unloaded but are in use by 1 ",
    ):
        slots.reserve()
    assert slots.release(old)
    with pytest.raises(NoFreeAdapterSlot, match="1 were unloaded but are in use by 0 requests"):
        slots.reserve()
    slots.free(slots.freeing)
    assert slots.reserve() == 0


def test_random_operations_keep_the_invariants_and_no_place_is_written_while_it_is_used():
    rng = random.Random(1)
    slots = AdapterSlots(4, [("a", b"a0")])
    used, reserved, number = [], [], 0
    for _ in range(5000):
        operation = rng.choice(("acquire", "release", "reserve", "add", "abandon", "remove", "free"))
        name, number = rng.choice("abc"), number + 1
        if operation == "acquire" and (known := slots.find(name)) is not None:
            used.append(slots.acquire(name, rng.choice((b"", known.adapter.digest))))
        elif operation == "release" and used:
            slots.release(used.pop(rng.randrange(len(used))))
        elif operation == "reserve":
            try:
                index = slots.reserve()
            except NoFreeAdapterSlot:
                continue
            assert index not in {adapter.index for adapter in used} | set(reserved) | slots.freeing
            assert index not in {one.adapter.index for one in slots}
            reserved.append(index)
        elif operation == "add" and reserved:
            slots.add(reserved.pop(), name, str(number).encode(), "")
        elif operation == "abandon" and reserved:
            slots.abandon(reserved.pop())
        elif operation == "remove" and slots.find(name) is not None:
            slots.remove(name)
        elif operation == "free":
            slots.free(slots.freeing)
        slots.check_integrity()
