"""Asks for the token ids of every answer: speed is worth nothing if the answers depend on how they were batched."""

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
import numpy as np

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from loadgen.errors import ResultError, TargetError
from loadgen.experiments.client import OPTIONS, greedy_spec
from loadgen.trace.schema import Trace

Answers = tuple[tuple[int, ...], ...]

_TIMEOUT_S = 1800.0


def greedy_answers(address: str, trace: Trace, vocab_size: int) -> Answers:
    """The greedy ids of every request of a trace, asked for all at once.

    Args:
        address: HOST:PORT of a frontend.
        trace: its lengths count; prompts are drawn from its digest, and prompts that share blocks begin alike.
        vocab_size: of the model.
    Raises: TargetError: a call failed.
    """
    prompts = _prompts(trace, vocab_size)
    return asyncio.run(_answers(address, prompts, trace.output_tokens.tolist()))


def require_equal_answers(name: str, answers: Answers, other_name: str, others: Answers) -> None:
    """Raises ResultError where an answer differs: which, and from which token on."""
    for index, (answer, other) in enumerate(zip(answers, others, strict=True)):
        if answer != other:
            same = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), None)
            where = f"from token {same} on" if same is not None else f"in length, {len(answer)} against {len(other)}"
            raise ResultError(f"{name} and {other_name} give different answers to request {index}: {where}")


def _prompts(trace: Trace, vocab_size: int) -> list[list[int]]:
    """Token ids from 1 on, by (digest, block) where the trace says what is shared, else by (digest, request)."""
    key = int(trace.digest[:16], 16)
    prompts = []
    for index, length in enumerate(trace.input_tokens.tolist()):
        blocks, size = (
            ([index], length) if trace.blocks is None else (trace.blocks.of(index), trace.blocks.block_tokens)
        )
        parts = [np.random.default_rng([key, int(block)]).integers(1, vocab_size, size) for block in blocks]
        prompts.append(np.concatenate(parts)[:length].tolist())
    return prompts


async def _answers(address: str, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Answers:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = GenerationServiceStub(channel)
        calls = [
            stub.Generate(pb.GenerateRequest(spec=greedy_spec(p, n, text=False)), timeout=_TIMEOUT_S)
            for p, n in zip(prompts, lengths, strict=True)
        ]
        try:
            responses = await asyncio.gather(*calls)
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"the ids cannot be checked: {error.code().name}: {error.details()}") from error
    return tuple(tuple(response.token_ids) for response in responses)
