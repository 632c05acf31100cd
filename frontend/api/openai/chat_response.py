"""Response of /v1/chat/completions: events and response object."""

from collections.abc import Iterable, Sequence

from chairlift.service.structured.output_constraint import OutputConstraint
from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.generation_spec import NO_LIMIT
from frontend.api.http.response_builder import JsonObject, finish_reason
from frontend.api.openai.chat_bodies import ChatBody
from frontend.api.openai.choices_builder import ChoicesBuilder, answers, end_fields, prompt_fields
from frontend.api.openai.generation_spec import chat_spec
from frontend.api.openai.logprobs import chat_logprobs
from frontend.request.request import ChatPrompt, RequestExtras
from frontend.slices import Sliced
from frontend.text.served_model import ServedModel


class ChatBuilder(ChoicesBuilder):
    """Builds the response to one call of /v1/chat/completions.

    Args:
        body: request body.
        model: the served model.
        request_id: of the call.
        chat: the conversation.
        constraint: what the answer must match; None: free text.
    """

    parses_answers = True

    def __init__(
        self,
        body: ChatBody,
        model: ServedModel,
        request_id: str,
        *,
        chat: ChatPrompt,
        constraint: OutputConstraint | None,
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        # Without a limit, because clients take an answer cut at a default length for a fault.
        extras = RequestExtras(chat, constraint, NO_LIMIT, body.prompt_options)
        super().__init__(body, [chat_spec(body, request_id)], model, request_id, extras=extras, kind=kind)
        self._body = body
        self._shows_reasoning = body.include_reasoning is not False
        self._one_call_only = body.parallel_tool_calls is False
        self._calls_end_answers = not body.calls_one_tool  # as OpenAI's: a call of a named tool ends with "stop"
        self._calling: set[int] = set()  # indices of answers that have called a tool

    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:  # noqa: ARG002
        """See EventBuilder.events."""
        match message.WhichOneof("event"):
            case "started":
                started = message.started
                self._usage.add_prompt(started.num_prompt_tokens, started.num_cached_tokens)
                echoed = self._body.echoed
                num_echoed = self._num_answers * (len(echoed) + len(started.prompt.token_ids))
                self._count_echo(num_echoed, echo=self._body.echo)
                first = {"role": "assistant", "content": echoed}
                choices = [_delta(index, first) for index in range(self._num_answers)]
                of_prompt = prompt_fields(self._body, started.prompt, self._model.tokenizer)
                return [self._event(choice) | of_prompt for choice in choices]
            case "chunk":
                self._usage.num_output_tokens += message.chunk.num_tokens
                choices = self._chunk_choices(message.chunk)
            case _:
                finished = message.finished
                self._usage.num_reasoning_tokens += finished.usage.num_reasoning_tokens
                index = finished.answer_index
                choices = [self._finish(_delta(index, {}), finished, has_calls=index in self._calling)]
        return [self._event(choice) for choice in choices]

    def response(self, responses: Sequence[pb.GenerateResponse]) -> Sliced[JsonObject]:
        """See ResponseBuilder.response."""
        (response,) = responses
        echoed = self._body.echoed
        self._count_echo(self._num_answers * len(echoed) + len(response.prompt.token_ids), echo=self._body.echo)
        choices = []
        for index, answer in enumerate(answers(response)):
            calls = answer.tool_calls[: 1 if self._one_call_only else None]
            message = _message_object(answer, calls, with_reasoning=self._shows_reasoning)
            if echoed:
                message["content"] = echoed + (message["content"] or "")
            choice: JsonObject = {"index": index, "message": message, "logprobs": self._logprobs(answer)}
            if self._body.return_token_ids:
                choice["token_ids"] = list(answer.token_ids)
            choices.append(self._finish(choice, answer.finished, has_calls=bool(answer.tool_calls)))
        of_prompt = prompt_fields(self._body, response.prompt, self._model.tokenizer)
        yield
        return (yield from self._whole(choices, responses)) | of_prompt

    def _chunk_choices(self, chunk: pb.Chunk) -> list[JsonObject]:
        """Returns one choice per part; data about tokens goes with the first and is sent even if no part is ready."""
        if chunk.tool_calls:
            self._calling.add(chunk.answer_index)
        calls = [call for call in chunk.tool_calls if not (self._one_call_only and call.index)]
        deltas = _delta_objects(chunk, calls, with_reasoning=self._shows_reasoning)
        has_token_data = chunk.HasField("logprobs") or self._body.return_token_ids or self._usage_in_every_event
        if has_token_data and not deltas:
            deltas = [{"content": ""}]
        choices = [_delta(chunk.answer_index, delta) for delta in deltas]
        if choices:
            choices[0]["logprobs"] = self._logprobs(chunk)
            if self._body.return_token_ids:
                choices[0]["token_ids"] = list(chunk.token_ids)
        return choices

    def _logprobs(self, part: pb.Chunk | pb.GenerateResponse | pb.Answer) -> JsonObject | None:
        if not part.HasField("logprobs"):
            return None
        token_ids = part.token_ids if self._body.return_tokens_as_token_ids else None
        return chat_logprobs(part.logprobs, self._model.tokenizer, token_ids)

    def _finish(self, choice: JsonObject, finished: pb.Finished, *, has_calls: bool) -> JsonObject:
        reason = finish_reason(finished)
        if has_calls and reason == "stop" and self._calls_end_answers:
            reason = "tool_calls"
        return {**choice, "finish_reason": reason, **end_fields(finished)}


def _delta(index: int, delta: JsonObject) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta_objects(chunk: pb.Chunk, calls: Iterable[pb.ToolCallDelta], *, with_reasoning: bool) -> list[JsonObject]:
    """Returns the deltas for a chunk, one for each part (reasoning, content, tool call)."""
    deltas: list[JsonObject] = []
    if chunk.reasoning and with_reasoning:
        deltas.append({"reasoning_content": chunk.reasoning})
    if chunk.text:
        deltas.append({"content": chunk.text})
    return deltas + [{"tool_calls": [_call_delta(call)]} for call in calls]


def _message_object(
    answer: pb.GenerateResponse | pb.Answer, calls: Iterable[pb.ToolCall], *, with_reasoning: bool
) -> JsonObject:
    """Returns the message of a complete answer."""
    tool_calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
        for call in calls
    ]
    content = answer.text if answer.text or not tool_calls else None
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning and with_reasoning:
        message["reasoning_content"] = answer.reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def _call_delta(call: pb.ToolCallDelta) -> JsonObject:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments_json}}
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
