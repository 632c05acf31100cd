"""Loads and unloads adapters in all engines, and loads those that are loaded into an engine that attaches later.

What is wanted follows what engines report: an adapter that is loaded in one of them at run time, by this process or by
another frontend, is wanted, until one of them unloads it. A process remembers what was unloaded, for an engine that was
away meanwhile. A frontend that starts learns what is wanted from the engines.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import grpc
import grpc.aio

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineUnavailable, InvalidRequest, ModelNotFound, RequestError
from frontend.routing.held_adapters import HeldAdapters
from frontend.text.served_model import Adapter

if TYPE_CHECKING:
    from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceAsyncStub

CHANGE_TIMEOUT_S = 300.0
"""How long an engine may take to load an adapter."""

MAX_REMEMBERED = 1024
"""Most unloaded adapters that are remembered, the oldest is forgotten first."""

_RETRY_S = 2.0

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


class AdapterEngine(Protocol):
    """An attached engine, as adapters are loaded to it; `EngineConnection` is one."""

    @property
    def address(self) -> str:
        """Its address, for messages."""
        ...

    @property
    def stub(self) -> "EngineServiceAsyncStub | None":
        """Its calls; None once it is lost."""
        ...


class Holder(NamedTuple):
    """An engine and the adapters that it has."""

    engine: AdapterEngine
    adapters: HeldAdapters


class AdapterControl:
    """Changes the adapters of all engines.

    Args:
        holders: returns the engines that serve the model.
        on_change: called after the adapters of an engine have changed.
    """

    def __init__(self, holders: Callable[[], Sequence[Holder]], on_change: Callable[[], None]) -> None:
        self._holders = holders
        self._on_change = on_change
        self._wanted: dict[str, Adapter] = {}  # loaded at run time, by name
        self._unloaded: OrderedDict[Adapter, None] = OrderedDict()  # without paths
        self._lock = asyncio.Lock()  # one change at a time, in the same order in all engines
        self._updates: set[asyncio.Task[None]] = set()
        self._changes: set[asyncio.Task[object]] = set()  # by calls

    def preferred(self, name: str) -> bytes | None:
        """Returns the digest of the adapter of this name that is wanted; None: not known."""
        wanted = self._wanted.get(name)
        return wanted.sha256 if wanted is not None else None

    def pending(self) -> Sequence[Adapter]:
        """Returns the adapters that engines are being given: a request for one may wait."""
        return list(self._wanted.values()) if self._updates else []

    def was_unloaded(self, adapter: Adapter) -> bool:
        """Whether an engine has unloaded this adapter, and none has loaded it since."""
        return _without_path(adapter) in self._unloaded

    def note(self, before: Mapping[str, Adapter], now: Mapping[str, Adapter]) -> None:
        """Follows a change that an engine has reported."""
        for adapter in before.values():
            if now.get(adapter.name) != adapter:
                self._forget(adapter)
        for adapter in now.values():
            if before.get(adapter.name) != adapter:
                self._remember(adapter)

    def attach(self, engine: AdapterEngine, adapters: HeldAdapters, *, is_known: bool) -> None:
        """Takes an engine that has attached: learns from it, loads what it lacks, and unloads what was unloaded.

        What it learns is loaded in the engines that were attached before. An engine that has started anew keeps the
        adapters of its flags.

        Args:
            is_known: whether the same process was attached here before.
        """
        if not adapters.can_change:
            return
        stale = [one for one in adapters.by_name.values() if (is_known or one.path) and self.was_unloaded(one)]
        known = set(self._wanted)
        for adapter in adapters.by_name.values():
            if adapter not in stale and adapter.name not in known:
                self._remember(adapter)
        missing = [one for one in self._wanted.values() if not adapters.has(one.name, one.sha256)]
        self._start_update(Holder(engine, adapters), stale, missing)
        learnt = [one for name, one in self._wanted.items() if name not in known]
        for holder in self._holders() if learnt else ():
            if holder.engine is not engine and holder.adapters.can_change:
                absent = [one for one in learnt if one.name not in holder.adapters.by_name]
                self._start_update(holder, (), absent)

    async def stop(self) -> None:
        """Ends the updates of engines, and the calls of `load` and `unload` with EngineUnavailable."""
        tasks = [*self._updates, *self._changes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load(self, name: str, path: str, *, replace: bool) -> tuple[bytes, int]:
        """Loads an adapter in all engines, or in none, also if the caller is cancelled.

        Returns: the digest of its files, and the number of engines.

        Raises:
            InvalidRequest: an engine refuses it; the message says which, and what was undone.
            ModelNotFound: the folder does not exist in an engine.
            EngineUnavailable: there is no engine, or one does not answer.
        """
        return await self._finish(self._load_all(name, path, replace=replace))

    async def _load_all(self, name: str, path: str, *, replace: bool) -> tuple[bytes, int]:
        async with self._lock:
            holders = self._all_holders()
            request = pb.LoadAdapterRequest(name=name, path=path, replace=replace)
            outcomes = await asyncio.gather(*(self._load(holder, request) for holder in holders))
            loaded = [
                (holder, outcome)
                for holder, outcome in zip(holders, outcomes, strict=True)
                if isinstance(outcome, pb.LoadAdapterResponse)
            ]
            errors = {
                holder.engine.address: outcome
                for holder, outcome in zip(holders, outcomes, strict=True)
                if isinstance(outcome, RequestError)
            }
            digests = {outcome.sha256 for _, outcome in loaded}
            if not errors and len(digests) == 1:
                return digests.pop(), len(loaded)
            if not errors:
                listed = ", ".join(f"{holder.engine.address}: {one.sha256.hex()[:12]}" for holder, one in loaded)
                errors[""] = InvalidRequest(f"the engines have different files at this path, by digest {listed}")
            undone = [await self._undo(holder, name, outcome) for holder, outcome in loaded]
            raise _combined(errors, undone)

    async def unload(self, name: str) -> int:
        """Unloads an adapter from all engines, also if the caller is cancelled; returns how many had it.

        Raises:
            ModelNotFound: no engine has it.
            InvalidRequest: an engine does not change its adapters.
            EngineUnavailable: there is no engine, or one does not answer, which unloads it when it attaches again.
        """
        return await self._finish(self._unload_all(name))

    async def _unload_all(self, name: str) -> int:
        async with self._lock:
            holders = [holder for holder in self._all_holders() if name in holder.adapters.by_name]
            if not holders:
                raise ModelNotFound(f"lora_name {name[:256]!r} cannot be found")
            outcomes = await asyncio.gather(*(self._unload(holder, name) for holder in holders))
            errors = {
                holder.engine.address: outcome
                for holder, outcome in zip(holders, outcomes, strict=True)
                if outcome is not None and not isinstance(outcome, ModelNotFound)
            }
            if errors:
                unloaded = [
                    f"{holder.engine.address}: unloaded"
                    for holder, outcome in zip(holders, outcomes, strict=True)
                    if outcome is None
                ]
                raise _combined(errors, unloaded)
            return len(holders)

    async def _finish(self, change: Coroutine[object, object, _T]) -> _T:
        """Waits for a change, which continues if the caller is cancelled: otherwise only some engines would have it."""
        task = asyncio.create_task(change, name="adapter-update")
        self._changes.add(task)
        task.add_done_callback(self._end_change)
        return await _answer(asyncio.shield(task))

    def _end_change(self, change: asyncio.Task[object]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # marks it as retrieved: the caller may be gone

    def _all_holders(self) -> Sequence[Holder]:
        holders = self._holders()
        if not holders:
            raise EngineUnavailable("no engine is attached", retry_after_s=_RETRY_S)
        return holders

    async def _load(self, holder: Holder, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse | RequestError:
        try:
            response = await _answer(_stub(holder).LoadAdapter(request, timeout=CHANGE_TIMEOUT_S))
        except EngineUnavailable as error:
            return error
        except grpc.aio.AioRpcError as error:
            return _engine_error(error)
        self._take(holder, response.adapters)
        return response

    async def _unload(self, holder: Holder, name: str, sha256: bytes = b"") -> RequestError | None:
        held = holder.adapters.by_name.get(name)
        if held is not None:
            self._forget(held)  # also if the engine does not answer
        try:
            request = pb.UnloadAdapterRequest(name=name, sha256=sha256)
            response = await _answer(_stub(holder).UnloadAdapter(request, timeout=CHANGE_TIMEOUT_S))
        except EngineUnavailable as error:
            return error
        except grpc.aio.AioRpcError as error:
            return _engine_error(error)
        self._take(holder, response.adapters)
        return None

    async def _undo(self, holder: Holder, name: str, loaded: pb.LoadAdapterResponse) -> str:
        """Unloads what a failed call has loaded; returns what is true now."""
        if loaded.has_replaced:
            return f"{holder.engine.address}: replaced, which cannot be undone"
        if not loaded.is_new:
            return f"{holder.engine.address}: had it before"
        error = await self._unload(holder, name, loaded.sha256)
        return f"{holder.engine.address}: {'loaded and unloaded again' if error is None else error.message}"

    def _start_update(self, holder: Holder, stale: Sequence[Adapter], missing: Sequence[Adapter]) -> None:
        if stale or missing:
            update = asyncio.create_task(self._update(holder, stale, missing), name="adapter-update")
            self._updates.add(update)
            update.add_done_callback(self._end_update)

    async def _update(self, holder: Holder, stale: Sequence[Adapter], missing: Sequence[Adapter]) -> None:
        for adapter in stale:
            async with self._lock:
                error = await self._unload(holder, adapter.name, adapter.sha256)
            if error is not None:
                logger.warning(
                    "engine %s still has adapter %s: %s", holder.engine.address, ascii(adapter.name), error.message
                )
        for adapter in missing:
            request = pb.LoadAdapterRequest(name=adapter.name, path=adapter.path, sha256=adapter.sha256, replace=True)
            async with self._lock:
                if self._wanted.get(adapter.name) != adapter:  # unloaded meanwhile
                    continue
                outcome = await self._load(holder, request)
            if isinstance(outcome, RequestError):
                logger.error(
                    "engine %s lacks adapter %s, its requests go to others: %s",
                    holder.engine.address,
                    ascii(adapter.name),
                    outcome.message,
                )

    def _end_update(self, update: asyncio.Task[None]) -> None:
        self._updates.discard(update)
        if not update.cancelled():
            if (error := update.exception()) is not None:
                logger.error("updating the adapters of an engine failed", exc_info=error)
            self._on_change()

    def _take(self, holder: Holder, reported: pb.AdapterList) -> None:
        before = holder.adapters.by_name
        if holder.adapters.update(reported):
            self.note(before, holder.adapters.by_name)
            self._on_change()

    def _remember(self, adapter: Adapter) -> None:
        self._unloaded.pop(_without_path(adapter), None)
        if adapter.path:
            self._wanted[adapter.name] = adapter

    def _forget(self, adapter: Adapter) -> None:
        wanted = self._wanted.get(adapter.name)
        if wanted is not None and wanted.sha256 == adapter.sha256:
            del self._wanted[adapter.name]
        self._unloaded[_without_path(adapter)] = None
        while len(self._unloaded) > MAX_REMEMBERED:
            self._unloaded.popitem(last=False)


def _stub(holder: Holder) -> "EngineServiceAsyncStub":
    stub = holder.engine.stub
    if stub is None:
        raise EngineUnavailable("the engine went away", retry_after_s=_RETRY_S)
    return stub


async def _answer(call: Awaitable[_T]) -> _T:
    """Waits for a call, which its channel cancels when the engine is lost, and `stop` cancels too."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineUnavailable("the engine went away", retry_after_s=_RETRY_S) from None


def _without_path(adapter: Adapter) -> Adapter:
    return Adapter(adapter.name, adapter.sha256)


def _engine_error(error: grpc.aio.AioRpcError) -> RequestError:
    detail = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return InvalidRequest(detail)
        case grpc.StatusCode.NOT_FOUND:
            return ModelNotFound(detail)
        case grpc.StatusCode.UNIMPLEMENTED:
            return InvalidRequest("this engine's version does not load adapters at run time: update it")
        case _:
            return EngineUnavailable(f"the engine does not answer: {detail}", retry_after_s=_RETRY_S)


def _combined(errors: Mapping[str, RequestError], others: Sequence[str]) -> RequestError:
    """Returns one error of the class of the first one, which says what each engine has done."""
    first = next(iter(errors.values()))
    if len(errors) == 1 and not others:
        return first
    reports = [f"{address}: {error.message}" if address else error.message for address, error in errors.items()]
    message = "; ".join([*reports, *others])
    if isinstance(first, EngineUnavailable):
        return EngineUnavailable(message, retry_after_s=first.retry_after_s)
    return type(first)(message)
