"""The adapters of an engine while it serves: which requests use which, loading and unloading.

It lives on the event loop. Adapters are read, checked and packed on a thread, to a slot that no request uses, so that
the step loop neither waits nor knows. A slot is written again only when a fence has passed through the step loop: no
step in flight reads it any more.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.adapter_slots import AdapterSlots
from engine.core.request import Adapter
from engine.errors import AdapterNotFound, EngineDraining, InvalidRequest, NoFreeAdapterSlot
from engine.flags import MAX_ADAPTER_NAME_CHARS, is_adapter_name
from engine.interfaces import Fence, Inbox
from engine.serving.thread_priority import lower_priority

NUM_THREADS = 2
"""A second thread, so that an adapter on a slow disk does not delay all others."""

MAX_PATH_CHARS = 4096

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class AdapterLoader(Protocol):
    """Reads adapters from the disk into the model."""

    def __call__(self, index: int, name: str, path: str, sha256: bytes) -> bytes:
        """Loads an adapter to a slot that no step uses, on the calling thread; returns the digest of its files.

        Args:
            index: the slot.
            name: its name, for errors.
            path: as received.
            sha256: digest that its files must have; empty: any.

        Raises:
            CheckpointError: it cannot be read, or does not fit the model or the reserved memory.
            AdapterNotFound: there is no such folder.
            InvalidRequest: the files have another digest.
        """
        ...


class EngineAdapters:
    """Counts the requests of each adapter, and loads and unloads adapters.

    Args:
        model_names: names of the model, which no adapter may have.
        slots: the adapters of the start.
        inbox: of the step loop.
        load: None: they never change.
        on_change: called after each change of the list.
    """

    def __init__(
        self,
        model_names: Sequence[str],
        slots: AdapterSlots,
        inbox: Inbox,
        load: AdapterLoader | None,
        on_change: Callable[[], None],
    ) -> None:
        self._model_names = model_names
        self._slots = slots
        self._inbox = inbox
        self._load = load
        self._on_change = on_change
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="adapters", initializer=lower_priority)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name, one change at a time
        self._changes: set[asyncio.Task[object]] = set()
        self._fences: dict[int, frozenset[int]] = {}  # slots that each frees
        self._freed = asyncio.Event()
        self._fence_numbers = itertools.count(1)
        self._is_closed = False

    def acquire(self, name: str, digest: bytes) -> Adapter:
        """See `AdapterSlots.acquire`."""
        return self._slots.acquire(name, digest)

    def release(self, adapter: Adapter) -> None:
        """Ends the use of an adapter by a request, whose last command is in the inbox."""
        if self._slots.release(adapter):
            self._fence()

    def pass_fence(self, number: int) -> None:
        """Frees the slots of a fence that the step loop has reported."""
        self._slots.free(self._fences.pop(number))
        self._freed.set()

    def listed(self) -> pb.AdapterList | None:
        """Returns the adapters that requests may use; None if they never change."""
        if self._load is None:
            return None
        adapters = [pb.Adapter(name=one.name, sha256=one.adapter.digest, path=one.path) for one in self._slots]
        return pb.AdapterList(revision=self._slots.revision, adapters=adapters)

    async def load(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Loads an adapter. A call that is cancelled does not stop it.

        Raises:
            CheckpointError, AdapterNotFound: see `AdapterLoader`.
            InvalidRequest: the name or the path is not valid, or an adapter of this name must not be replaced.
            NoFreeAdapterSlot: all slots are taken.
            EngineDraining: the engine stops.
        """
        return await self._change(request.name, self._loaded(request))

    async def unload(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Unloads an adapter; requests that use it finish.

        Raises:
            AdapterNotFound: there is none of this name and digest.
            InvalidRequest: adapters never change.
        """
        return await self._change(request.name, self._unloaded(request))

    def close(self) -> None:
        """Loads nothing more."""
        self._is_closed = True
        self._freed.set()  # a change that waits for a slot ends
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _change(self, name: str, change: Coroutine[object, object, _T]) -> _T:
        lock = self._locks.get(name) or self._locks.setdefault(name, asyncio.Lock())

        async def in_turn() -> _T:
            async with lock:
                return await change

        task = asyncio.create_task(in_turn(), name="adapter-change")
        self._changes.add(task)
        task.add_done_callback(self._end_change)
        return await asyncio.shield(task)

    def _end_change(self, task: asyncio.Task[object]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # read here, because the call that waited for it may have been cancelled

    async def _loaded(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        name, load = request.name, self._changeable()
        if not is_adapter_name(name) or name in self._model_names:
            raise InvalidRequest(
                f"lora_name is {name[:MAX_ADAPTER_NAME_CHARS]!r}, it must have 1 to {MAX_ADAPTER_NAME_CHARS} printable "
                "characters, without spaces around them, and differ from the model's names"
            )
        if not 0 < len(request.path) <= MAX_PATH_CHARS:
            raise InvalidRequest(f"lora_path has {len(request.path)} characters, it must have 1 to {MAX_PATH_CHARS}")
        known = self._slots.find(name)
        if known is not None and request.sha256 and request.sha256 == known.adapter.digest:
            return pb.LoadAdapterResponse(adapters=self.listed(), sha256=known.adapter.digest)
        if known is not None and not request.replace:
            raise InvalidRequest(f"lora_name {name!r} has already been loaded; set load_inplace to replace it")
        index = await self._reserve()
        try:
            digest = await asyncio.get_running_loop().run_in_executor(
                self._threads, load, index, name, request.path, request.sha256
            )
        except BaseException:
            self._slots.abandon(index)
            raise
        if known is not None and known.adapter.digest == digest:
            self._slots.abandon(index)
            return pb.LoadAdapterResponse(adapters=self.listed(), sha256=digest)
        if self._slots.add(index, name, digest, request.path):
            self._fence()
        _log.info("Loaded adapter %s: digest %s, path %s", ascii(name), digest.hex()[:12], ascii(request.path))
        self._on_change()
        return pb.LoadAdapterResponse(
            adapters=self.listed(), sha256=digest, is_new=known is None, has_replaced=known is not None
        )

    async def _unloaded(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        self._changeable()
        known = self._slots.find(request.name)
        if known is None or request.sha256 not in (b"", known.adapter.digest):
            raise AdapterNotFound(f"lora_name {request.name[:MAX_ADAPTER_NAME_CHARS]!r} cannot be found")
        if self._slots.remove(request.name):
            self._fence()
        _log.info("Unloaded adapter %s: %d requests finish with it", ascii(request.name), known.num_requests)
        self._on_change()
        return pb.UnloadAdapterResponse(adapters=self.listed())

    async def _reserve(self) -> int:
        """Reserves a slot; waits for one that is being freed, until the steps in flight end."""
        while True:
            try:
                return self._slots.reserve()
            except NoFreeAdapterSlot:
                if not self._slots.freeing:
                    raise
            self._freed.clear()
            await self._freed.wait()
            self._changeable()

    def _changeable(self) -> AdapterLoader:
        if self._load is None:
            raise InvalidRequest(
                "this engine does not load adapters at run time: start it with --enable-lora and --lora-dir"
            )
        if self._is_closed:
            raise EngineDraining("the engine is draining and loads no adapters")
        return self._load

    def _fence(self) -> None:
        number = next(self._fence_numbers)
        self._fences[number] = self._slots.freeing.difference(*self._fences.values())
        self._inbox.put(Fence(number))
