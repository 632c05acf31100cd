"""Collects the messages of a public stream into the response of a unary call."""

from collections.abc import AsyncIterator, Sequence

from chairlift.v1 import generation_service_pb2 as pb


async def collect_answer(messages: AsyncIterator[pb.StreamGenerateResponse]) -> pb.GenerateResponse:
    """Returns the response that the messages add up to."""
    response = pb.GenerateResponse()
    chunks: dict[int, list[pb.Chunk]] = {}  # by answer
    async for message in messages:
        match message.WhichOneof("event"):
            case "started":
                _take_started(response, message.started)
            case "chunk":
                chunks.setdefault(message.chunk.answer_index, []).append(message.chunk)
            case "finished":
                _nth_answer(response, message.finished.answer_index).finished.CopyFrom(message.finished)
    for index, parts in chunks.items():
        _take_chunks(_nth_answer(response, index), parts)
    return response


def _take_started(response: pb.GenerateResponse, started: pb.Started) -> None:
    response.request_id, response.model = started.request_id, started.model
    response.effective_sampling.CopyFrom(started.effective_sampling)
    response.effective_stop.CopyFrom(started.effective_stop)
    if started.HasField("prompt"):
        response.prompt.CopyFrom(started.prompt)


def _take_chunks(answer: pb.GenerateResponse | pb.Answer, chunks: Sequence[pb.Chunk]) -> None:
    answer.text = "".join(chunk.text for chunk in chunks)
    answer.reasoning = "".join(chunk.reasoning for chunk in chunks)
    arguments: list[list[str]] = []  # by call
    for chunk in chunks:
        answer.token_ids.extend(chunk.token_ids)
        if chunk.HasField("logprobs"):
            answer.logprobs.MergeFrom(chunk.logprobs)  # appends to the columns
            answer.logprobs.top_width = chunk.logprobs.top_width
        for delta in chunk.tool_calls:
            if delta.index == len(arguments):
                answer.tool_calls.add(id=delta.id, name=delta.name)
                arguments.append([])
            arguments[delta.index].append(delta.arguments_json)
    for call, pieces in zip(answer.tool_calls, arguments, strict=True):
        call.arguments_json = "".join(pieces)


def _nth_answer(response: pb.GenerateResponse, index: int) -> pb.GenerateResponse | pb.Answer:
    """Returns answer `index` of the response, created if it is missing."""
    while len(response.other_answers) < index:
        response.other_answers.add()
    return response.other_answers[index - 1] if index else response
