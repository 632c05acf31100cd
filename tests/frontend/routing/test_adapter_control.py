"""What a frontend knows of adapters while an engine is given them, and which of two reports counts."""

import asyncio
from types import SimpleNamespace

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.routing.adapter_control import AdapterControl, Holder
from frontend.routing.held_adapters import HeldAdapters
from frontend.text.served_model import Adapter
from tests.hang import HANG_S

ADAPTER = pb.Adapter(name="a", sha256=b"1", path="path")
SAME = Adapter("a", b"1", "path")


def report(revision, *adapters):
    return pb.AdapterList(revision=revision, adapters=adapters)


def held(*adapters, revision=0):
    return HeldAdapters(list(adapters), pb.EngineStatus(adapters=report(revision, *adapters)))


class SlowEngine:
    """An engine that loads an adapter once it may."""

    address = "engine"

    def __init__(self):
        self.may_load = asyncio.Event()
        self.stub = SimpleNamespace(LoadAdapter=self._load)

    async def _load(self, request, timeout):
        await self.may_load.wait()
        return pb.LoadAdapterResponse(sha256=request.sha256, is_new=True, adapters=report(1, ADAPTER))


async def test_an_adapter_is_pending_while_an_engine_is_given_it():
    changed, engine, adapters = asyncio.Event(), SlowEngine(), held()
    control = AdapterControl(lambda: [Holder(engine, adapters)], changed.set)
    control.note({}, {"a": SAME})
    assert control.pending() == []
    control.attach(engine, adapters, is_known=False)
    assert control.pending() == [SAME]
    engine.may_load.set()
    while control.pending():
        changed.clear()
        await asyncio.wait_for(changed.wait(), HANG_S)
    assert adapters.by_name == {"a": SAME}


@pytest.mark.parametrize(("path", "is_known"), [("path", True), ("path", False), ("", True), ("", False)])
async def test_an_engine_unloads_what_was_unloaded_while_it_was_away(path, is_known):
    """But not what a flag gives to an engine that has started since."""
    adapter = pb.Adapter(name="a", sha256=b"1", path=path)
    unloaded = []

    async def unload(request, timeout):
        unloaded.append(request.name)
        return pb.UnloadAdapterResponse(adapters=report(1))

    engine = SimpleNamespace(address="engine", stub=SimpleNamespace(UnloadAdapter=unload))
    control = AdapterControl(list, lambda: None)
    control.note({"a": Adapter("a", b"1", path)}, {})
    control.attach(engine, held(adapter), is_known=is_known)
    await asyncio.wait_for(asyncio.gather(*control._updates), HANG_S)
    assert unloaded == (["a"] if path or is_known else [])
    assert control.was_unloaded(SAME) is bool(unloaded)


def test_an_older_report_changes_nothing():
    adapters = held(revision=3)
    for revision in (2, 3):
        assert not adapters.update(report(revision, ADAPTER))
        assert adapters.by_name == {}
    assert adapters.update(report(4, ADAPTER))
    assert adapters.by_name == {"a": SAME}
    assert not adapters.update(report(5, ADAPTER))
    assert not adapters.update(report(4))
    assert adapters.by_name == {"a": SAME}
