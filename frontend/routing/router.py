"""All engines of this frontend: each has a client, each request goes to one of them, and to another when that is lost.

Engines come from addresses that are given and from names that are looked up again and again (`resolver.py`). All that
get new requests serve the same model: that of the serving engine which has been attached longest. Which one gets a
request is `placement.py`'s to say, what becomes of requests without an engine `failover.py`'s.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.access.engine_tls import EngineTls
from frontend.errors import EngineUnavailable, QueueFull, RequestError
from frontend.observability.metrics import Metrics
from frontend.routing.connection import MAX_BACKOFF_S, Attachment, EngineConnection
from frontend.routing.failover import FailoverQueue
from frontend.routing.pending import PendingRequest
from frontend.routing.placement import Candidate, Placement
from frontend.routing.resolver import Resolver, name_and_port
from frontend.routing.supervision import EngineEnd, SupervisorNote, note_path, read_note
from frontend.text.served_model import ModelKey
from frontend.text.tokenizer_source import TokenizerSource

logger = logging.getLogger(__name__)

_Usable = tuple[EngineConnection, Attachment]


class Router:
    """Keeps this process attached to its engines.

    Args:
        addresses: of engines, or names of several; see `resolver.py`.
        tokenizers: gives the tokenizer that the model needs.
        metrics: told what each engine says of itself.
        heartbeat_timeout_s, step_timeout_s: see EngineConnection.
        failover_timeout_s: how long a request whose engine is lost waits for another.
        max_moves: most engines in a row that a request may lose without getting further.
        on_change: called when `serving` may have changed.
        tls: see EngineConnection.
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
        self._tls = tls
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._step_timeout_s = step_timeout_s
        self._on_change = on_change
        self._failover = FailoverQueue(
            self._place,
            timeout_s=failover_timeout_s,
            max_moves=max_moves,
            note_waiting=metrics.note_without_engine,
            supervision=self,
        )
        self._placement = Placement()
        self._connections: dict[str, EngineConnection] = {}  # by address
        self._found: dict[str, list[str]] = {}  # addresses by name
        self._leaving: set[asyncio.Task[None]] = set()
        self._attached: list[Attachment] = []  # longest first
        self._by_model: dict[ModelKey, list[_Usable]] = {}  # all that serve
        self._usable: list[_Usable] = []  # of these, those for new requests
        self._foreign: dict[str, ModelKey] = {}  # by address: what the log has said of engines with another model
        self._is_running = False
        self._resolvers: list[Resolver] = []
        self._fixed: set[str] = set()
        for address in dict.fromkeys(addresses):
            name = name_and_port(address)
            if name is None:
                self._fixed.add(address)
                self._add_connection(address, was_found=False)
            else:
                self._resolvers.append(self._resolver(address, *name))

    @property
    def serving(self) -> bool:
        """Whether requests are taken."""
        return bool(self._usable)

    @property
    def is_urgent(self) -> bool:
        """Whether no engine serves."""
        return not self._usable

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an engine."""
        return self._failover.num_waiting

    def attachment(self) -> Attachment:
        """The engine that is least busy now, for what the model is and can.

        Raises:
            EngineUnavailable: none takes requests.
        """
        if len(self._usable) == 1:
            return self._usable[0][1]
        if not self._usable:
            raise self._unavailable()
        return self._usable[self._placement.least_loaded(_loads(self._usable))][1]

    def submit(
        self, submission: pb.Submission, model: ModelKey, *, window: int, coalesce: bool, now_s: float
    ) -> PendingRequest:
        """Sends a request to an engine; if none is there any more, it waits for one.

        Args:
            submission: all but handle and credit; becomes the pending's.
            model: what it has been checked against.
            window, coalesce: see RequestStream.
            now_s: time.monotonic().

        Raises:
            RequestError: the frontend stops.
        """
        pending = PendingRequest(submission, model, window=window, coalesce=coalesce, now_s=now_s)
        self._failover.submit(pending, self._unavailable())
        return pending

    def start(self) -> None:
        """Starts connecting in the background. May be called again."""
        self._is_running = True
        for resolver in self._resolvers:
            resolver.start()
        for client in self._connections.values():
            client.start()

    async def stop(self, error: RequestError) -> None:
        """Ends all streams; what is still open fails with `error`. May be called again."""
        self._is_running = False
        self._failover.stop(error)
        await asyncio.gather(
            *(resolver.stop() for resolver in self._resolvers),
            *(client.stop(error) for client in self._connections.values()),
            *self._leaving,
        )

    # What clients tell.

    def can_replace(self, attachment: Attachment) -> bool:
        """See ConnectionEvents."""
        usable = self._by_model.get(attachment.model.key, ())
        return any(there.instance_id != attachment.instance_id for _, there in usable)

    def changed(self) -> None:
        """See ConnectionEvents."""
        self._note_attached()
        by_model: dict[ModelKey, list[_Usable]] = {}
        instance_ids: set[str] = set()
        for client, attachment in self._attached_clients():
            if not client.serving or not self._is_named(client.address):
                continue
            if attachment.instance_id not in instance_ids:  # else an engine with two addresses
                instance_ids.add(attachment.instance_id)
                by_model.setdefault(attachment.model.key, []).append((client, attachment))
        self._by_model = by_model
        longest = next((there for there in self._attached if there.instance_id in instance_ids), None)
        self._usable = by_model[longest.model.key] if longest is not None else []
        for model, engines in by_model.items():
            for client, _ in engines:
                self._note_model(client.address, model)
        self._placement.keep_only(instance_ids)
        num_waited = self._failover.num_waiting
        self._failover.retry()  # before anybody hears of it: who has waited goes first
        if self._usable and (num_gone := num_waited - self._failover.num_waiting):
            left = self._failover.num_waiting
            who, go = ("request", "goes") if num_gone == 1 else ("requests", "go")
            logger.info("%d %s that waited for an engine %s on, %d still %s", num_gone, who, go, left, _wait(left))
        self._on_change()

    def lost(self, client: EngineConnection, requests: list[PendingRequest]) -> None:
        """See ConnectionEvents."""
        if requests:
            self._failover.lost(requests, EngineUnavailable("the engine went away", retry_after_s=MAX_BACKOFF_S))
            num_waiting = sum(self._failover.is_waiting(pending) for pending in requests)
            num_failed = sum(pending.stream.closed for pending in requests)
            num_moved = len(requests) - num_waiting - num_failed
            client.metrics.count_lost(len(requests))
            logger.warning(
                "engine %s lost %d open %s: %d moved to another engine, %d %s for one, %d failed",
                client.address,
                len(requests),
                "request" if len(requests) == 1 else "requests",
                num_moved,
                num_waiting,
                _wait(num_waiting),
                num_failed,
            )
        self._drop_vanished()

    def given_back(self, pending: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        """See ConnectionEvents."""
        if was_taken:  # it stops: nobody is to blame for that
            for client, attachment in self._attached_clients():
                if attachment.instance_id == pending.instance_id:
                    client.metrics.count_lost(1)
                    break
            self._failover.returned(pending, error, was_taken=True, try_at_once=True)
            return
        pending.refused_by.add(pending.instance_id)
        is_wanted_elsewhere = bool(self._candidates(pending))
        if isinstance(error, QueueFull):
            if not pending.stream.epoch and not is_wanted_elsewhere:
                pending.stream.fail(error)
                return
            # Whoever has been promised an answer waits for a place; if none comes, that is no queue to come back to.
            error = EngineUnavailable(error.message, retry_after_s=error.retry_after_s)
        if not is_wanted_elsewhere:
            pending.refused_by.clear()
        self._failover.returned(pending, error, was_taken=False, try_at_once=is_wanted_elsewhere)

    # Supervision.

    def restart_until_s(self) -> float:
        """See Supervision."""
        return max((note.restart_until_s for note in self._notes()), default=0.0)

    def end_of(self, instance_id: str) -> EngineEnd | None:
        """See Supervision. A supervisor writes down an end before it starts the next engine: what it has not written
        down when an engine serves has not ended, or was not its own.
        """
        notes = self._notes()
        for note in notes:
            if instance_id in note.ends:
                return note.ends[instance_id]
        return None if notes and not self.serving else EngineEnd.FAILED

    def _notes(self) -> list[SupervisorNote]:
        sockets = (Path(address.removeprefix("unix:")) for address in self._connections if address.startswith("unix:"))
        notes = (read_note(note_path(socket)) for socket in sockets)
        return [note for note in notes if note is not None]

    # Placing.

    def _place(self, pending: PendingRequest) -> bool:
        usable = self._candidates(pending)
        if not usable:
            return False
        chosen = 0
        if len(usable) > 1:
            submission = pending.submission
            chosen = self._placement.choose(_loads(usable), submission.prompt_ids, submission.cache_salt)
        attachment = usable[chosen][1]
        attachment.session.submit(pending)
        pending.engine, pending.instance_id = attachment.engine, attachment.instance_id
        return True

    def _candidates(self, pending: PendingRequest) -> Sequence[_Usable]:
        """Engines that can take it, and have not refused it. Those of another model than new requests get are good for
        what they had, or others like them.
        """
        usable = self._by_model.get(pending.model, ())
        if not pending.refused_by:
            return usable
        return [(client, there) for client, there in usable if there.instance_id not in pending.refused_by]

    def _unavailable(self) -> EngineUnavailable:
        states = sorted({client.state for client in self._connections.values() if client.attachment is not None})
        message = f"the engine is {' or '.join(states)}" if states else "no engine is attached"  # why: see the log
        return EngineUnavailable(message, retry_after_s=MAX_BACKOFF_S)

    def _note_attached(self) -> None:
        attached = [attachment for _, attachment in self._attached_clients()]
        known = [attachment for attachment in self._attached if attachment in attached]
        self._attached = known + [attachment for attachment in attached if attachment not in known]

    def _attached_clients(self) -> list[_Usable]:
        attachments = ((client, client.attachment) for client in self._connections.values())
        return [(client, attachment) for client, attachment in attachments if attachment is not None]

    def _note_model(self, address: str, key: ModelKey) -> None:
        """Says of an engine with another model that it is not used, once until it is or has another one."""
        ours = self._usable[0][1].model.key
        if key == ours:
            self._foreign.pop(address, None)
            return
        if self._foreign.get(address) == key:
            return
        self._foreign[address] = key
        differences = [
            f"{name} {_shown(theirs)} instead of {_shown(our)}"
            for name, theirs, our in zip(ModelKey._fields, key, ours, strict=True)
            if theirs != our
        ]
        logger.error("engine %s is not used: it has %s", address, ", ".join(differences))

    # Addresses.

    def _resolver(self, address: str, name: str, port: int) -> Resolver:
        def take(addresses: list[str]) -> None:
            if addresses != self._found.get(address):
                logger.info("engines at %s: %s", name, ", ".join(addresses))
                self._found[address] = addresses
                for found in addresses:
                    if found not in self._connections:
                        self._add_connection(found, was_found=True, server_name=name)
                self.changed()
            self._drop_vanished()

        return Resolver(name, port, take, lambda: self.is_urgent)

    def _add_connection(self, address: str, *, was_found: bool, server_name: str | None = None) -> None:
        client = self._connections[address] = EngineConnection(
            address,
            self._tokenizers,
            self._metrics.engine(),
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            step_timeout_s=self._step_timeout_s,
            users=self,
            was_found=was_found,
            tls=self._tls,
            server_name=server_name,
        )
        if self._is_running:
            client.start()

    def _is_named(self, address: str) -> bool:
        return address in self._fixed or any(address in found for found in self._found.values())

    def _drop_vanished(self) -> None:
        """Lets go of engines that no name stands for any more, once they have nothing left to do for us."""
        for address, client in list(self._connections.items()):
            if not self._is_named(address) and not client.num_open:
                del self._connections[address]
                self._foreign.pop(address, None)
                self._metrics.drop_engine(client.metrics)
                leaving = asyncio.create_task(client.stop(self._unavailable()), name="engine-leaving")
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)
                logger.info("engine %s is no longer named: let go", address)


def _loads(usable: Sequence[_Usable]) -> list[Candidate]:
    return [Candidate(attachment.instance_id, client.load()) for client, attachment in usable]


def _shown(value: object) -> str:
    return value.hex()[:12] if isinstance(value, bytes) else str(value)


def _wait(number: int) -> str:
    return "waits" if number == 1 else "wait"
