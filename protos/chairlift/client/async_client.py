"""The asyncio client: the methods of `Client`, as coroutines."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc
from grpc import aio

from chairlift.client.connection import DEFAULT_TARGET, Tls, call_timeout_s, channel_options, key_metadata
from chairlift.client.errors import GenerationError, closed_error, generation_error
from chairlift.client.progress import Progress
from chairlift.client.prompt_batch import ManyOptions, Params, Prompt, PromptBatch
from chairlift.client.request import ChatTurns, GenerationOptions, count_request, generation_spec
from chairlift.client.streamed_answer import StreamedAnswer
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub

Call = TypeVar("Call")
Response = TypeVar("Response")


class AsyncGenerationStream(StreamedAnswer):
    """A streamed answer: iterate over its chunks. Leaving an `async with` block, or `cancel`, ends the generation.

    StreamedAnswer's attributes hold what was received so far.
    """

    def __init__(self, call: aio.UnaryStreamCall[pb.StreamGenerateRequest, pb.StreamGenerateResponse]) -> None:
        super().__init__()
        self._call = call
        self._responses = aiter(call)
        self._was_cancelled = False

    def __aiter__(self) -> AsyncIterator[pb.Chunk]:
        return self

    async def __anext__(self) -> pb.Chunk:
        """Returns the next chunk. Cancelling this, as by a timeout, ends the generation.

        Raises:
            GenerationError: the call failed; chunks before it remain valid.
        """
        try:
            async for response in self._responses:
                chunk = self._take(response)
                if chunk is not None:
                    return chunk
        except grpc.RpcError as error:
            raise generation_error(error) from error
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                self._was_cancelled = True
                raise
            if not self._was_cancelled:
                raise closed_error() from error
        if self._was_cancelled:  # grpc's iterator just ends after an error
            raise GenerationError(grpc.StatusCode.CANCELLED, "the generation was cancelled")
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ends the generation; the engine frees its memory within two steps. Does nothing if it has ended."""
        self._was_cancelled |= self._call.cancel()

    def __del__(self) -> None:
        # grpc keeps a running call alive: the engine would continue an answer that nothing reads.
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncClient:
    """Calls a Chairlift server. Create it inside a running event loop; close it, or use it in an `async with` block.

    Arguments and errors of the class and of its methods are those of `Client`.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        self._metadata = key_metadata(api_key)
        self._channel = (
            aio.insecure_channel(target, options=channel_options(target))
            if tls is None
            else aio.secure_channel(target, tls.credentials(), options=channel_options(target))
        )
        self._stub = GenerationServiceStub(self._channel)

    async def generate(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerationOptions]
    ) -> pb.GenerateResponse:
        """Runs a request to its end; see `Client.generate`."""
        request = pb.GenerateRequest(spec=generation_spec(text, options))
        return await _outcome(self._start(self._stub.Generate, request, timeout_s))

    def stream(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerationOptions]
    ) -> AsyncGenerationStream:
        """Starts a request and returns its answer as a stream; see `Client.stream`."""
        request = pb.StreamGenerateRequest(spec=generation_spec(text, options))
        return AsyncGenerationStream(self._start(self._stub.StreamGenerate, request, timeout_s))

    @overload
    async def generate_many(
        self, prompts: Iterable[Prompt], params: Params = None, *, return_errors: Literal[False] = False,
        **options: Unpack[ManyOptions],
    ) -> list[pb.GenerateResponse]: ...  # fmt: skip

    @overload
    async def generate_many(
        self, prompts: Iterable[Prompt], params: Params = None, *, return_errors: bool, **options: Unpack[ManyOptions]
    ) -> list[pb.GenerateResponse | GenerationError]: ...

    async def generate_many(
        self, prompts: Iterable[Prompt], params: Params = None, *, return_errors: bool = False,
        **options: Unpack[ManyOptions],
    ) -> Sequence[pb.GenerateResponse | GenerationError]:  # fmt: skip
        """Runs many prompts and returns their answers in the prompts' order; see `Client.generate_many`."""
        batch = PromptBatch(prompts, params, return_errors=return_errors, **options)
        calls: dict[int, Any] = {}
        done: asyncio.Queue[int] = asyncio.Queue()
        try:
            with Progress(len(batch.requests), show=batch.progress) as bar:
                while not batch.complete:
                    for index in batch.take_due(time.monotonic()):
                        calls[index] = self._start(self._stub.Generate, batch.requests[index], batch.timeout_s)
                        calls[index].add_done_callback(lambda _, index=index: done.put_nowait(index))
                    try:
                        async with asyncio.timeout(batch.wait_s(time.monotonic())):
                            index = await done.get()
                    except TimeoutError:
                        continue
                    try:
                        batch.answered(index, await _outcome(calls.pop(index)))
                    except GenerationError as error:
                        batch.failed(index, error, time.monotonic())
                    bar.update(batch.num_settled, batch.num_output_tokens)
        finally:
            for call in calls.values():
                call.cancel()
        return batch.outcomes()

    async def count_tokens(
        self, text: str | None = None, *, chat: ChatTurns | None = None, model: str | None = None,
        return_token_ids: bool = False, timeout_s: float | None = None,
    ) -> pb.CountTokensResponse:  # fmt: skip
        """Counts the tokens of a prompt; see `Client.count_tokens`."""
        request = count_request(text, chat, model, return_token_ids)
        return await _outcome(self._start(self._stub.CountTokens, request, timeout_s))

    async def get_model(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelResponse:
        """Returns the served model and its limits; see `Client.get_model`."""
        return await _outcome(self._start(self._stub.GetModel, pb.GetModelRequest(model=model), timeout_s))

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, timeout_s: float | None = None
    ) -> pb.LoadAdapterResponse:
        """Loads a LoRA adapter into all engines; see `Client.load_adapter`."""
        request = pb.LoadAdapterRequest(name=name, path=path, replace=replace)
        return await _outcome(self._start(self._stub.LoadAdapter, request, timeout_s))

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> pb.UnloadAdapterResponse:
        """Unloads a LoRA adapter; see `Client.unload_adapter`."""
        return await _outcome(self._start(self._stub.UnloadAdapter, pb.UnloadAdapterRequest(name=name), timeout_s))

    async def close(self) -> None:
        """Closes the channel. Running and later calls raise a GenerationError; see `Client.close`."""
        await self._channel.close()

    def _start(self, method: Callable[..., Call], request: object, timeout_s: float | None) -> Call:
        try:
            return method(request, timeout=call_timeout_s(timeout_s), metadata=self._metadata)
        except aio.UsageError as error:  # grpc's error for a closed channel
            raise closed_error() from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _outcome(call: Awaitable[Response]) -> Response:
    try:
        return await call
    except grpc.RpcError as error:
        raise generation_error(error) from error
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        raise closed_error() from error  # only a closing channel cancels a call under a task that awaits it


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
