"""A frontend's end of the Attach stream, for tests: strict where a frontend is lenient.

It fails on the first message that breaks a rule of the wire.
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from tests.hang import HANG_S


def submission(handle: int, prompt_ids: Sequence[int], max_tokens: int = 16, **fields: object) -> pb.Submission:
    """A valid submission: greedy, seed 0.

    Args:
        handle: the request's name on the stream.
        prompt_ids: the prompt.
        max_tokens: most output tokens.
        fields: further fields of Submission; `output_ids` as a list of ids.
    """
    output_ids = fields.pop("output_ids", [])
    message = pb.Submission(
        handle=handle,
        prompt_ids=np.asarray(prompt_ids, dtype="<u4").tobytes(),
        output_ids=np.asarray(output_ids, dtype="<u4").tobytes(),
        start_index=len(output_ids),  # type: ignore[arg-type]
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
        stops=pb.TokenStops(max_tokens=max_tokens),
        request_id=f"test-{handle}",
    )
    message.MergeFrom(pb.Submission(**fields))  # type: ignore[arg-type]
    return message


@dataclass(slots=True)
class Received:
    """What came for one handle."""

    epoch: int
    token_ids: list[int] = field(default_factory=list)
    chosen_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    is_accepted: bool = False
    first_token: pb.FirstToken | None = None
    completion: pb.Completion | None = None
    rejection: pb.Rejection | None = None

    @property
    def is_running(self) -> bool:
        """Whether it is accepted and its terminal message has not come."""
        return self.is_accepted and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether its terminal message has come."""
        return self.completion is not None or self.rejection is not None


class AttachClient:
    """A frontend's end of one Attach stream.

    Attributes:
        welcome: the answer to Hello.
        received: by handle; a handle that is submitted again starts anew.
        steps, statuses, drains, rejections: what came so far.
    """

    def __init__(self, call: "grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]", *, acks: bool) -> None:
        self._call = call
        self._acks = acks
        self._seqs = itertools.count(2)
        self.last_seq = 1
        self.welcome = pb.Welcome()
        self.received: dict[int, Received] = {}
        self.steps: list[pb.StepResult] = []
        self.statuses: list[pb.EngineStatus] = []
        self.drains: list[pb.DrainNotice] = []
        self.rejections: list[pb.Rejection] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        address: str,
        *,
        acks: bool = True,
        hello: pb.Hello | None = None,
    ) -> AsyncIterator["AttachClient"]:
        """Dials, shakes hands, and hangs up at the end of the block.

        Args:
            address: of the engine.
            acks: whether to acknowledge every StepResult at once. Who wants to read to the end of a stream that the
                engine ends must not: if a write comes too late, what is not read yet is lost (see `LINGER_S`).
            hello: instead of a matching one.
        Raises: grpc.aio.AioRpcError: the engine refuses.
        """
        async with grpc.aio.insecure_channel(address) as channel:
            call = EngineServiceStub(channel).Attach()
            client = cls(call, acks=acks)
            hello = hello or pb.Hello(protocol_major=1, frontend_id=hashlib.sha256(str(id(call)).encode()).hexdigest())
            await call.write(pb.AttachRequest(command_seq=1, hello=hello))
            client.welcome = (await client._read()).welcome
            assert client.welcome.session_id, "the first message was no welcome"
            try:
                yield client
            finally:
                call.cancel()

    async def submit(self, *submissions: pb.Submission) -> None:
        """Sends new requests."""
        for message in submissions:
            previous = self.received.get(message.handle)
            if previous is None or previous.has_ended:
                self.received[message.handle] = Received(
                    message.epoch, np.frombuffer(message.output_ids, dtype="<u4").tolist()
                )
        await self.send(submit=pb.SubmitBatch(submissions=submissions))

    async def cancel(self, *handles: int, reason: "pb.CancelReason" = pb.CANCEL_REASON_CLIENT) -> None:
        """Stops requests."""
        await self.send(cancel=pb.CancelBatch(handles=handles, reason=reason))

    async def grant(self, handle: int, tokens: int) -> None:
        """Gives credit."""
        await self.send(credit=pb.CreditGrant(handles=[handle], tokens=[tokens]))

    async def ack(self, step_seq: int) -> None:
        """Acknowledges StepResults up to this one."""
        await self.send(ack=pb.StepAck(step_seq=step_seq))

    async def send(self, **command: object) -> None:
        """Sends any command."""
        self.last_seq = next(self._seqs)
        await self._call.write(pb.AttachRequest(command_seq=self.last_seq, **command))  # type: ignore[arg-type]

    async def hang_up(self) -> None:
        """Ends the frontend's side of the stream."""
        await self._call.done_writing()

    async def next(self) -> str:
        """Takes in one message; returns which kind it was.

        Raises: EOFError: the engine has ended the stream.
        """
        message = await self._read()
        kind = str(message.WhichOneof("event"))
        match kind:
            case "step":
                self._take_step(message.step)
                if self._acks:
                    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it ends: read on
                        await self.ack(message.step.step_seq)
            case "admission":
                self._take_admission(message.admission)
            case "status":
                self.statuses.append(message.status)
            case "drain":
                self.drains.append(message.drain)
        assert kind in ("step", "admission", "status", "drain"), f"unexpected {kind}"
        return kind

    async def until(self, condition: Callable[[], object]) -> None:
        """Takes in messages until the condition holds."""
        while not condition():
            await self.next()

    async def ended(self, *handles: int) -> list[Received]:
        """Takes in messages until these requests have ended."""
        await self.until(lambda: all(self.received[handle].has_ended for handle in handles))
        return [self.received[handle] for handle in handles]

    async def until_read(self) -> None:
        """Takes in messages until the engine has read every command sent so far, whatever its step loop does.

        The reader of the stream refuses a request with the handle 0 when its turn comes.
        """
        await self.submit(submission(0, [1]))
        await self.ended(0)

    async def generate(self, *submissions: pb.Submission) -> list[Received]:
        """Submits requests and waits for all of them."""
        await self.submit(*submissions)
        return await self.ended(*(message.handle for message in submissions))

    async def _read(self) -> pb.AttachResponse:
        message = await self._call.read()
        if isinstance(message, pb.AttachResponse):
            return message
        raise EOFError(f"the engine has ended the stream: {await self._call.code()}")

    def _take_admission(self, admission: pb.AdmissionResult) -> None:
        for handle in admission.accepted_handles:
            received = self.received[handle]
            assert not received.is_accepted, f"handle {handle} was accepted twice"
            received.is_accepted = True
        for rejection in admission.rejections:
            self.rejections.append(rejection)
            received = self.received[rejection.handle]
            if rejection.epoch == received.epoch and not received.is_accepted:
                assert not received.has_ended, f"handle {rejection.handle} ended twice"
                received.rejection = rejection

    def _take_step(self, step: pb.StepResult) -> None:
        assert step.step_seq == len(self.steps) + 1, f"step_seq {step.step_seq} after {len(self.steps)}"
        self.steps.append(step)
        num_rows = len(step.handles)
        counts = list(step.token_counts) or [1] * num_rows
        epochs = list(step.epochs) or [0] * num_rows
        assert len(counts) == len(epochs) == len(step.start_indices) == num_rows, "columns differ in length"
        assert sum(counts) == len(step.token_ids), "token_counts and token_ids differ"
        assert len(set(step.handles)) == num_rows, "two rows for one handle"
        told = [*step.handles, *(m.handle for m in step.prompt_logprobs), *(m.handle for m in step.completions)]
        for handle in told:  # its first event stands for the acceptance, if none came before
            self.received[handle].is_accepted = True
        self._take_prompt_logprobs(step)
        token_ids = iter(step.token_ids)
        for handle, count, epoch, start in zip(step.handles, counts, epochs, step.start_indices, strict=True):
            received = self.received[handle]
            assert received.is_running, f"tokens for handle {handle} out of turn"
            assert epoch == received.epoch, f"handle {handle}: epoch {epoch}, not {received.epoch}"
            assert start == len(received.token_ids), f"handle {handle}: start {start}, not {len(received.token_ids)}"
            received.token_ids += itertools.islice(token_ids, count)
        self._take_logprobs(step, counts)
        for first in step.first_tokens:
            assert self.received[first.handle].first_token is None, f"two first tokens for handle {first.handle}"
            self.received[first.handle].first_token = first
        for completion in step.completions:
            received = self.received[completion.handle]
            assert received.is_running, f"handle {completion.handle} ended out of turn"
            assert completion.num_output_tokens == len(received.token_ids), (
                f"handle {completion.handle}: tokens are missing"
            )
            received.completion = completion

    def _take_prompt_logprobs(self, step: pb.StepResult) -> None:
        for message in step.prompt_logprobs:
            received = self.received[message.handle]
            assert received.is_running, f"prompt logprobs for handle {message.handle} out of turn"
            assert received.first_token is None, f"prompt logprobs for handle {message.handle} after its first token"
            assert message.epoch == received.epoch, f"handle {message.handle}: epoch {message.epoch}"
            assert message.start_index == 1 + len(received.prompt_logprobs), f"from {message.start_index} on"
            received.prompt_logprobs += message.chosen
            pairs = iter(zip(message.top_ids, message.top_values, strict=True))
            received.prompt_top_logprobs += [list(itertools.islice(pairs, message.top_width)) for _ in message.chosen]

    def _take_logprobs(self, step: pb.StepResult, counts: list[int]) -> None:
        columns = step.logprobs
        chosen, pairs = iter(columns.chosen), iter(zip(columns.top_ids, columns.top_values, strict=True))
        for row, width in zip(columns.rows, columns.top_widths, strict=True):
            received = self.received[step.handles[row]]
            for _ in range(counts[row]):
                received.chosen_logprobs.append(next(chosen))
                received.top_logprobs.append(list(itertools.islice(pairs, width)))


async def engine_status(address: str) -> pb.GetEngineStatusResponse:
    """Asks an engine for its state."""
    async with grpc.aio.insecure_channel(address) as channel:
        return await asyncio.wait_for(EngineServiceStub(channel).GetEngineStatus(pb.GetEngineStatusRequest()), HANG_S)
