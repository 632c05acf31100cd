"""Connections of a router to engines, without sockets, for tests that drive both on their own clock."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineUnavailable, RequestError
from frontend.routing.connection import Attachment
from frontend.routing.held_adapters import HeldAdapters
from frontend.routing.session import EngineSession
from frontend.text.served_model import ModelKey


class MemoryConnection:
    """Stands for `EngineConnection`; a subclass passes messages between the session and an engine."""

    def __init__(self, address: str, tokenizers: Any, metrics: Any, *, events: Any, **_: Any) -> None:
        self.address, self.metrics, self._events = address, metrics, events
        self.attachment: Attachment | None = None
        self.engine_state = pb.ENGINE_STATE_UNSPECIFIED
        self._num_instances = 0

    @property
    def serving(self) -> bool:
        return self.attachment is not None and self.engine_state == pb.ENGINE_STATE_SERVING

    @property
    def state(self) -> str:
        return pb.EngineState.Name(self.engine_state).removeprefix("ENGINE_STATE_").lower()

    @property
    def num_open(self) -> int:
        return self.attachment.session.num_open if self.attachment is not None else 0

    def start(self) -> None:
        """The test starts engines."""

    async def stop(self, error: RequestError) -> None:
        self.die(error)

    def attach(self, key: ModelKey, *, block_size: int) -> None:
        """A new engine process serves a model."""
        self._num_instances += 1
        instance_id = f"{self.address} {self._num_instances}"
        model: Any = SimpleNamespace(name=key.name, key=key, vocab_size=key.vocab_size, aliases=())
        session = EngineSession(
            vocab_size=key.vocab_size,
            block_size=block_size,
            step_window=64,
            wake=lambda: None,
            on_rejected=partial(self._events.on_rejected, instance_id),
        )
        adapters = HeldAdapters([], pb.EngineStatus())
        self.attachment = Attachment(self.metrics.engine, instance_id, model, session, adapters)
        self.set_state(pb.ENGINE_STATE_SERVING)

    def set_state(self, state: "pb.EngineState") -> None:
        self.engine_state = state
        self._events.on_changed()

    def die(self, parting_error: RequestError | None = None) -> None:
        """kill -9: what is on its way is lost."""
        attachment, self.attachment = self.attachment, None
        self.engine_state = pb.ENGINE_STATE_UNSPECIFIED
        if attachment is not None:
            requests, unsent = attachment.session.end(EngineUnavailable("gone"))
            if parting_error is not None:
                for request in (*requests, *unsent):
                    request.stream.fail(parting_error)
                requests, unsent = [], []
            self._events.on_changed()
            self._events.on_lost(self.address, attachment, requests, unsent)
