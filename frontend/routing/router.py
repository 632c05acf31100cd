"""Routes each request to an engine, and to another one if that engine is lost.

Engines have fixed addresses or come from names that are looked up periodically (`resolver.py`). All engines that get
new requests serve the same model: that of the serving engine that has been attached longest. `placement.py` chooses
among them. A request passes router, connection and session; events return through `on_changed`, `on_lost` and
`on_rejected`. Requests without an engine wait in the failover queue.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from frontend.access.engine_tls import EngineTls
from frontend.engine_address import EngineAddress
from frontend.errors import EngineUnavailable, ModelNotFound, QueueFull, RequestError
from frontend.observability.metrics import Metrics
from frontend.routing.adapter_control import AdapterControl, Holder
from frontend.routing.connection import MAX_BACKOFF_S, Attachment, EngineConnection
from frontend.routing.failover import FailoverQueue
from frontend.routing.forecast import FleetForecast
from frontend.routing.held_adapters import HeldAdapters
from frontend.routing.pending import PendingRequest
from frontend.routing.placement import Candidate, Placement
from frontend.routing.resolver import Resolver, name_and_port
from frontend.routing.supervision import SupervisorNotes
from frontend.text.served_model import Adapter, ModelKey
from frontend.text.tokenizer_source import TokenizerSource

logger = logging.getLogger(__name__)

_Usable = tuple[EngineConnection, Attachment]


class _Known(NamedTuple):
    instance_id: str
    model: ModelKey
    adapters: HeldAdapters


class Router:
    """Keeps this process attached to its engines, and assigns requests to them.

    Args:
        addresses: addresses or host names of engines; see `resolver.py`.
        tokenizers: loads the model's tokenizer.
        metrics: the frontend's metrics.
        heartbeat_timeout_s, step_timeout_s, tls: see EngineConnection.
        failover_timeout_s: how long a request waits for another engine after its engine was lost.
        max_moves: maximum engines in a row that a request may lose without progress.
        on_change: called when `serving` may have changed.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tokenizers: TokenizerSource,
        metrics: Metrics,
        *,
        heartbeat_timeout_s: float,
        step_timeout_s: float,
        failover_timeout_s: float,
        max_moves: int,
        on_change: Callable[[], None],
        tls: EngineTls | None = None,
    ) -> None:
        self._connect = partial(
            EngineConnection,
            tokenizers=tokenizers,
            heartbeat_timeout_s=heartbeat_timeout_s,
            step_timeout_s=step_timeout_s,
            events=self,
            tls=tls,
        )
        self._metrics = metrics
        self._on_change = on_change
        self._connections: dict[str, EngineConnection] = {}  # by address
        self._failover = FailoverQueue(
            lambda request: self._place(request) is not None,
            timeout_s=failover_timeout_s,
            max_moves=max_moves,
            on_waiting=metrics.note_without_engine,
            supervision=SupervisorNotes(lambda: self._connections, lambda: self.serving),
        )
        self._rejected_by: WeakKeyDictionary[PendingRequest, set[str]] = WeakKeyDictionary()  # instance ids
        self._placement = Placement()
        self._attached: list[Attachment] = []  # attached longest first
        self._by_model: dict[ModelKey, list[_Usable]] = {}  # all serving engines
        self._usable: list[_Usable] = []  # serving engines for new requests
        self._aliases: tuple[str, ...] = ()  # of these
        self._adapters: tuple[Adapter, ...] = ()  # of these
        self.adapter_control = AdapterControl(
            lambda: [Holder(connection, attachment.adapters) for connection, attachment in self._usable],
            self._adapters_changed,
        )
        self._known: dict[str, _Known] = {}  # by address: engines attached now or last
        self._unused: dict[str, ModelKey] = {}  # by address: models of unused engines that are logged already
        self._fixed: set[str] = set()  # addresses
        self._found: dict[str, list[str]] = {}  # addresses by name
        self._resolvers: list[Resolver] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._is_running = False
        self._stop_error: RequestError | None = None
        for address in dict.fromkeys(addresses):
            kind, target = EngineAddress.parse(address)
            name = name_and_port(target)
            if name is None:
                self._fixed.add(address)
                self._add_connection(address, was_found=False)
            else:
                self._resolvers.append(self._resolver(EngineAddress(kind, target), *name))

    @property
    def serving(self) -> bool:
        """Whether requests are accepted."""
        return bool(self._usable)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for an engine."""
        return self._failover.num_waiting

    def attachment(self, model_name: str = "") -> Attachment:
        """Returns the least loaded engine, whose model describes what the frontend serves, with the names and adapters
        of all.

        Args:
            model_name: what a request names, if there is one.

        Raises:
            EngineUnavailable: no engine accepts requests, or the one with this adapter is away.
        """
        if not self._usable:
            raise self._unavailable()
        if self._is_away(model_name):
            raise EngineUnavailable(f"no engine with adapter {model_name!r} is attached", retry_after_s=MAX_BACKOFF_S)
        index = 0 if len(self._usable) == 1 else self._placement.least_loaded(_loads(self._usable))
        attachment = self._usable[index][1]
        if not self._adapters and not self._aliases:
            return attachment
        model = replace(attachment.model, aliases=self._aliases, adapters=self._adapters)
        return replace(attachment, model=model)

    def forecast(self, due_s: float, model_name: str = "") -> FleetForecast:
        """Returns what predicts the first token of a new request on each engine that it may go to.

        Args:
            due_s: time.monotonic() of its first token.
            model_name: the model or the adapter that it names.
        """
        usable: Sequence[_Usable] = self._usable
        for adapter in self._adapters:
            if adapter.name == model_name:
                usable = [one for one in usable if one[1].adapters.has(model_name, adapter.sha256)]
        return FleetForecast(tuple(attachment.session.forecast(due_s) for _, attachment in usable))

    def submit(self, request: PendingRequest) -> str | None:
        """Sends a new request to an engine, or queues it if no engine is left.

        Returns: the engine's name in metrics; None if the request waits.

        Raises:
            RequestError: the frontend stops.
            ModelNotFound: its adapter has been unloaded.
        """
        if self._stop_error is not None:
            raise self._stop_error
        attachment = self._place(request)
        if attachment is None:
            submission = request.submission
            adapter = Adapter(submission.adapter, submission.adapter_sha256)
            is_expected = self._is_pending(adapter) or self._is_away(adapter.name)
            if adapter.name and self._engines_for(request.model) and not is_expected:
                raise ModelNotFound(f"model {adapter.name!r} is not served here: its adapter has been unloaded")
            error = self._unavailable("no engine takes requests for this model any more" if self._usable else "")
            self._failover.add(request, error)
            return None
        return attachment.engine

    def start(self) -> None:
        """Starts connecting in the background. May be called again."""
        self._is_running = True
        for resolver in self._resolvers:
            resolver.start()
        for connection in self._connections.values():
            connection.start()

    async def stop(self, error: RequestError) -> None:
        """Ends all streams; open requests fail with `error`. May be called again."""
        self._is_running = False
        self._stop_error = error
        self._failover.stop(error)
        await self.adapter_control.stop()
        await asyncio.gather(
            *(resolver.stop() for resolver in self._resolvers),
            *(connection.stop(error) for connection in self._connections.values()),
            *self._leaving,
        )

    # Implements ConnectionEvents.

    def on_attached(self, connection: EngineConnection, attachment: Attachment) -> None:
        """Gives the engine the adapters that others were given."""
        known = self._known.get(connection.address)
        is_known = known is not None and known.instance_id == attachment.instance_id
        self.adapter_control.attach(connection, attachment.adapters, is_known=is_known)

    def on_adapters(self, before: Mapping[str, Adapter], now: Mapping[str, Adapter]) -> None:
        """Follows a change of an engine's adapters."""
        self.adapter_control.note(before, now)
        self._adapters_changed()

    def can_replace(self, attachment: Attachment) -> bool:
        """Returns whether other engines serve the same model, and each request of this one has an engine among them."""
        needs = [self._engines_for(attachment.model.key), *map(self._engines_of, attachment.session.open_requests)]
        return all(any(other.instance_id != attachment.instance_id for _, other in usable) for usable in needs)

    def on_changed(self) -> None:
        """Updates the list of serving engines, and retries waiting requests."""
        attached = self._attached_connections()
        current = [attachment for _, attachment in attached]
        known = [attachment for attachment in self._attached if attachment in current]
        self._attached = known + [attachment for attachment in current if attachment not in known]
        by_model: dict[ModelKey, list[_Usable]] = {}
        instance_ids: set[str] = set()
        for connection, attachment in attached:
            self._known[connection.address] = _Known(attachment.instance_id, attachment.model.key, attachment.adapters)
            # An engine with two addresses counts once.
            if connection.serving and self._is_named(connection.address) and attachment.instance_id not in instance_ids:
                instance_ids.add(attachment.instance_id)
                by_model.setdefault(attachment.model.key, []).append((connection, attachment))
        self._by_model = by_model
        longest = next((attachment for attachment in self._attached if attachment.instance_id in instance_ids), None)
        self._usable = self._engines_for(longest.model.key) if longest is not None else []
        self._aliases = tuple(dict.fromkeys(alias for _, one in self._usable for alias in one.model.aliases))
        self._adapters = self._served_adapters()
        for model, engines in by_model.items():
            for connection, _ in engines:
                self._log_other_model(connection.address, model)
        self._placement.keep_only(instance_ids)
        num_before = self._failover.num_waiting
        self._failover.retry()  # before `on_change`, so that waiting requests precede new ones
        num_left = self._failover.num_waiting
        if self._usable and num_left < num_before:
            logger.info("%d waiting request(s) left the failover queue, %d still wait", num_before - num_left, num_left)
        self._on_change()

    def on_lost(
        self, address: str, attachment: Attachment, requests: list[PendingRequest], unsent: list[PendingRequest]
    ) -> None:
        """Moves the requests of a lost engine to other engines, or queues them.

        Those that were never sent to it cannot have caused its loss: they are treated as if it had rejected them.
        """
        error = EngineUnavailable("the engine went away", retry_after_s=MAX_BACKOFF_S)
        if requests:
            for request in requests:
                self._rejected_by.pop(request, None)
            heard_at_s = attachment.session.heard_at_s
            self._failover.add_lost(attachment.instance_id, requests, error, heard_at_s=heard_at_s)
            num_waiting = sum(self._failover.is_waiting(request) for request in requests)
            num_failed = sum(request.stream.closed for request in requests)
            logger.warning(
                "engine %s lost %d open request(s): %d moved to another engine, %d waiting, %d failed",
                address,
                len(requests),
                len(requests) - num_waiting - num_failed,
                num_waiting,
                num_failed,
            )
        for request in unsent:
            self.on_rejected(attachment.instance_id, request, error, was_taken=False)
        self._drop_removed()

    def on_rejected(self, instance_id: str, request: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        """Tries the other engines once each; after that the request waits or fails."""
        if was_taken:  # the engine stops, which no request caused
            self._rejected_by.pop(request, None)
            self._failover.add_rejected(request, error, was_taken=True, try_at_once=True)
            return
        self._rejected_by.setdefault(request, set()).add(instance_id)
        has_candidate = bool(self._candidates(request))
        if isinstance(error, QueueFull | ModelNotFound):
            if not request.epoch and not has_candidate:
                request.stream.fail(error)
                return
            # A request that an engine took before may wait; its client must not see that a queue is full.
            error = EngineUnavailable(error.message, retry_after_s=error.retry_after_s)
        if not has_candidate:
            del self._rejected_by[request]
        self._failover.add_rejected(request, error, was_taken=False, try_at_once=has_candidate)

    # Placing.

    def _place(self, request: PendingRequest) -> Attachment | None:
        """Submits a request to the best engine; returns None if there is none for it."""
        usable = self._candidates(request)
        if not usable and request in self._rejected_by:  # the others are gone: ask those that rejected it again
            del self._rejected_by[request]
            usable = self._candidates(request)
        if not usable:
            return None
        submission = request.submission
        salt = submission.cache_salt, submission.adapter, submission.adapter_sha256
        candidates = _loads(usable, with_blocks=not any(salt))
        chosen, num_cached_tokens = self._placement.choose(candidates, submission.prompt_ids, salt)
        attachment = usable[chosen][1]
        attachment.session.submit(request, num_cached_tokens)
        return attachment

    def _candidates(self, request: PendingRequest) -> Sequence[_Usable]:
        """Returns the engines that can serve a request and did not reject it."""
        usable = self._engines_of(request)
        rejected_by = self._rejected_by.get(request, ())
        return [one for one in usable if one[1].instance_id not in rejected_by] if rejected_by else usable

    def _engines_of(self, request: PendingRequest) -> Sequence[_Usable]:
        """Returns the engines that serve the request's model, which may be an older one, and have its adapter."""
        usable = self._engines_for(request.model)
        name, sha256 = request.submission.adapter, request.submission.adapter_sha256
        return [one for one in usable if one[1].adapters.has(name, sha256)] if name else usable

    def _engines_for(self, key: ModelKey) -> list[_Usable]:
        """Returns the serving engines of a model; of those that report their weights, only engines with the same."""
        if len(self._by_model) == 1 and key in self._by_model:
            return self._by_model[key]
        found: list[_Usable] = []
        for other, engines in self._by_model.items():
            if other.matches(key):
                found += engines
                if not key.weights_revision:
                    key = key._replace(weights_revision=other.weights_revision)
        return found

    def _adapters_changed(self) -> None:
        """Requests may wait for an adapter that an engine has got."""
        self._adapters = self._served_adapters()
        self._failover.retry()

    def _served_adapters(self) -> tuple[Adapter, ...]:
        """Returns the adapters of the usable engines; of several with the same name, the one that was loaded last.

        A name that another engine gives to the model is the model's.
        """
        adapters: dict[str, Adapter] = {}
        for _, attachment in self._usable:
            for name, adapter in attachment.adapters.by_name.items():
                if name not in adapters or adapter.sha256 == self.adapter_control.preferred(name):
                    adapters[name] = adapter
        if self._usable:
            for adapter in self.adapter_control.pending():
                adapters.setdefault(adapter.name, adapter)
        return tuple(adapter for adapter in adapters.values() if adapter.name not in self._aliases)

    def _is_pending(self, adapter: Adapter) -> bool:
        """Whether an engine is being given an adapter."""
        return any((one.name, one.sha256) == adapter[:2] for one in self.adapter_control.pending())

    def _is_away(self, name: str) -> bool:
        """Whether no engine has an adapter of this name, but one that left without unloading it had."""
        if not self._usable or name in self._aliases or any(adapter.name == name for adapter in self._adapters):
            return False
        served = self._usable[0][1].model.key
        left = [one.adapters.by_name.get(name) for one in self._known.values() if one.model.matches(served)]
        return any(adapter is not None and not self.adapter_control.was_unloaded(adapter) for adapter in left)

    def _unavailable(self, message: str = "") -> EngineUnavailable:
        # One that serves is another model's, or its address is no longer in DNS.
        states = sorted({one.state for one, _ in self._attached_connections() if not one.serving})
        message = message or (f"the engine is {' or '.join(states)}" if states else "no engine is attached")
        return EngineUnavailable(message, retry_after_s=MAX_BACKOFF_S)

    def _attached_connections(self) -> list[_Usable]:
        attachments = ((connection, connection.attachment) for connection in self._connections.values())
        return [(connection, attachment) for connection, attachment in attachments if attachment is not None]

    def _log_other_model(self, address: str, key: ModelKey) -> None:
        """Logs once that an engine is not used because its model differs."""
        used = self._usable[0][1].model.key
        if any(connection.address == address for connection, _ in self._usable):
            self._unused.pop(address, None)
            return
        if self._unused.get(address) == key:
            return
        self._unused[address] = key
        differences = [
            f"{name} {_shown(value)} instead of {_shown(used_value)}"
            for name, value, used_value in zip(ModelKey._fields, key, used, strict=True)
            if value != used_value
        ]
        logger.error("engine %s is not used: it has %s", address, ", ".join(differences))

    # Addresses.

    def _resolver(self, named: EngineAddress, name: str, port: int) -> Resolver:
        address = named.at(named.target)

        def take(targets: list[str]) -> None:
            addresses = [named.at(target) for target in targets]
            if addresses != self._found.get(address):
                logger.info("engines at %s: %s", name, ", ".join(addresses))
                self._found[address] = addresses
                for found in addresses:
                    if found not in self._connections:
                        self._add_connection(found, was_found=True, server_name=name)
                self.on_changed()
            self._drop_removed()

        return Resolver(name, port, take, lambda: self.serving)

    def _add_connection(self, address: str, *, was_found: bool, server_name: str | None = None) -> None:
        connection = self._connect(
            address, metrics=self._metrics.engine(address), was_found=was_found, server_name=server_name
        )
        self._connections[address] = connection
        if self._is_running:
            connection.start()

    def _is_named(self, address: str) -> bool:
        return address in self._fixed or any(address in found for found in self._found.values())

    def _drop_removed(self) -> None:
        """Closes connections without open requests whose address is no longer in DNS."""
        for address, connection in list(self._connections.items()):
            if not self._is_named(address) and not connection.num_open:
                del self._connections[address]
                self._unused.pop(address, None)
                self._known.pop(address, None)
                self._metrics.drop_engine(connection.metrics)
                leaving = asyncio.create_task(connection.stop(self._unavailable()), name="engine-leaving")
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)
                logger.info("removed engine %s: its address is no longer in DNS", address)


def _loads(usable: Sequence[_Usable], *, with_blocks: bool = False) -> list[Candidate]:
    """Returns the engines as placement sees them; the blocks that they report have neither a salt nor an adapter."""
    return [
        Candidate(one.instance_id, one.session.load(), one.cached_blocks if with_blocks else None) for _, one in usable
    ]


def _shown(value: object) -> str:
    return value.hex()[:12] if isinstance(value, bytes) else str(value)
