"""The asyncio client: the same calls as `sync_client.py`, to be awaited."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc
from grpc import aio

from chairlift.client.connection import Tls, key_metadata
from chairlift.client.errors import GenerationError, closed_error, generation_error
from chairlift.client.progress import Progress
from chairlift.client.prompt_batch import DEFAULT_IN_FLIGHT, Prompt, PromptBatch
from chairlift.client.request import (
    CHANNEL_OPTIONS,
    DEFAULT_TARGET,
    ChatTurns,
    GenerationOptions,
    count_request,
    generation_spec,
)
from chairlift.client.streamed_answer import StreamedAnswer
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub

Response = TypeVar("Response")
Started = TypeVar("Started")


class AsyncGenerationStream(StreamedAnswer):
    """An answer while it is generated: iterate over its chunks. Leaving an `async with` block, or `cancel`, ends the
    generation. What has come so far is in the attributes of StreamedAnswer.
    """

    def __init__(self, call: aio.UnaryStreamCall[pb.StreamGenerateRequest, pb.StreamGenerateResponse]) -> None:
        super().__init__()
        self._call = call
        self._responses = aiter(call)

    def __aiter__(self) -> AsyncIterator[pb.Chunk]:
        return self

    async def __anext__(self) -> pb.Chunk:
        """The next chunk.

        Raises:
            GenerationError: the call failed; what came before stays valid.
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
                raise
            raise GenerationError(
                grpc.StatusCode.CANCELLED, "the generation was cancelled, or its client closed"
            ) from error
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ends the generation; the engine frees its memory within two steps. Harmless when it is over."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """Calls a Chairlift frontend. Make it inside a running event loop; close it, or use it in an `async with` block.

    Args:
        target: address of the frontend, as gRPC spells it: HOST:PORT or unix:PATH.
        api_key: for servers that want one; None: the environment variable CHAIRLIFT_API_KEY, if it has a value.
        tls: for servers that speak TLS.

    Raises:
        OSError: a file of `tls` cannot be read.
        ValueError: no header can carry the key.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        self._metadata = key_metadata(api_key)
        self._channel = (
            aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else aio.secure_channel(target, tls.credentials(), options=CHANNEL_OPTIONS)
        )
        self._stub = GenerationServiceStub(self._channel)

    async def generate(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerationOptions]
    ) -> pb.GenerateResponse:
        """Runs a request to its end.

        Args:
            text: the prompt; or give `token_ids` or `chat`.
            timeout_s: deadline, seconds; the server schedules by it.
            options: see GenerationOptions.

        Raises:
            GenerationError: the call failed.
            TypeError: an unknown option, or not exactly one prompt.
            ValueError: a number that its field cannot hold.
        """
        request = pb.GenerateRequest(spec=generation_spec(text, options))
        return await _call(lambda: self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata))

    def stream(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerationOptions]
    ) -> AsyncGenerationStream:
        """Starts a request and returns its answer as it comes. Arguments and errors as `generate`."""
        request = pb.StreamGenerateRequest(spec=generation_spec(text, options))
        return AsyncGenerationStream(
            _start(lambda: self._stub.StreamGenerate(request, timeout=timeout_s, metadata=self._metadata))
        )

    @overload
    async def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        return_errors: Literal[False] = False,
        progress: bool | None = None,
    ) -> list[pb.GenerateResponse]: ...

    @overload
    async def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        return_errors: bool,
        progress: bool | None = None,
    ) -> list[pb.GenerateResponse | GenerationError]: ...

    async def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        return_errors: bool = False,
        progress: bool | None = None,
    ) -> Sequence[pb.GenerateResponse | GenerationError]:
        """Runs many prompts and returns their answers in the prompts' order.

        As many as `max_in_flight` are under way at any time, so that the engine's batch stays full; what the server has
        no room for, or no engine, is sent again after the time it says, for five minutes.

        Args:
            prompts: text, token ids or chat turns each.
            params: options of `generate` for all prompts, or one set for each.
            max_in_flight: more than the engine's seats (`--max-num-seqs`) keeps it busy.
            timeout_s: deadline of each prompt's call, seconds.
            return_errors: an error takes the place of its answer; otherwise the first one ends everything.
            progress: draw a progress bar; None: on a terminal, if tqdm is installed.

        Raises:
            GenerationError: a prompt failed; its note says which.
            TypeError: an unknown option, a prompt of another kind, or not as many params as prompts.
            ValueError: a number that its field cannot hold.
        """
        batch = PromptBatch(prompts, params, max_in_flight=max_in_flight, return_errors=return_errors)
        calls: dict[int, Any] = {}
        done: asyncio.Queue[int] = asyncio.Queue()
        try:
            with Progress(len(batch.requests), show=progress) as bar:
                while not batch.complete:
                    for index in batch.take_due(time.monotonic()):
                        start = partial(self._stub.Generate, batch.requests[index])
                        calls[index] = _start(partial(start, timeout=timeout_s, metadata=self._metadata))
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
        self,
        text: str | None = None,
        *,
        chat: ChatTurns | None = None,
        model: str | None = None,
        return_token_ids: bool = False,
        timeout_s: float | None = None,
    ) -> pb.CountTokensResponse:
        """Tokens that a prompt would have, its template and special tokens included.

        Raises:
            GenerationError: the call failed.
            TypeError: not exactly one prompt.
        """
        request = count_request(text, chat, model, return_token_ids)
        return await _call(lambda: self._stub.CountTokens(request, timeout=timeout_s, metadata=self._metadata))

    async def get_model(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelResponse:
        """The model that is served and its limits.

        Raises:
            GenerationError: the call failed.
        """
        request = pb.GetModelRequest(model=model)
        return await _call(lambda: self._stub.GetModel(request, timeout=timeout_s, metadata=self._metadata))

    async def close(self) -> None:
        """Closes the channel. Calls that run end with a GenerationError, as do later ones (reason CLIENT_CLOSED)."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _call(call: Callable[[], Awaitable[Response]]) -> Response:
    return await _outcome(_start(call))


def _start(call: Callable[[], Started]) -> Started:
    try:
        return call()
    except aio.UsageError as error:  # grpc's way to say that the channel is closed
        raise closed_error() from error


async def _outcome(call: Awaitable[Response]) -> Response:
    try:
        return await call
    except grpc.RpcError as error:
        raise generation_error(error) from error
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        raise closed_error() from error  # nothing else cancels a call under the task that waits for it


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
