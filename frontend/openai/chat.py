"""The answers of /v1/chat/completions."""

from collections.abc import Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.chat import ChatFormat
from frontend.openai.chat_bodies import ChatBody
from frontend.openai.chat_parts import ChatAnswer, delta_object, message_object
from frontend.openai.error_object import BodyError
from frontend.openai.job import Envelope, JsonObject, answers, finish_reason, stop_reason
from frontend.openai.logprobs import chat_logprobs
from frontend.openai.spec import chat_spec
from frontend.request import ChatPrompt
from frontend.served_model import ServedModel


class Chat:
    """One call of /v1/chat/completions.

    Args:
        body: what is asked.
        model: what answers.
        request_id: of the call.
        chat: the conversation.
        chat_format: how the model marks reasoning and calls.
        prompt_tail: end of the rendered prompt.

    Raises:
        BodyError: tools for a model whose calls cannot be told from its words.
    """

    default_max_tokens = 2**31 - 1  # what fits: clients take an answer that ends without their asking for a fault

    def __init__(
        self,
        body: ChatBody,
        model: ServedModel,
        request_id: str,
        *,
        chat: ChatPrompt,
        chat_format: ChatFormat,
        prompt_tail: str,
    ) -> None:
        if body.tool_names and chat_format.tools == "none":
            raise BodyError(
                400,
                "tools are not served with this model: its chat template shows no known form of tool calls",
                param="tools",
                code="unsupported_parameter",
            )
        self.request_id = request_id
        self.chat = chat
        spec = chat_spec(body, request_id)
        special_tokens = frozenset[str]()
        if chat_format.needs_special_tokens and not spec.output.keep_special_tokens:
            spec.output.keep_special_tokens = True
            special_tokens = model.tokenizer.special_tokens
        self.specs = [spec]
        self._body = body
        self._model = model
        self._answers = [
            ChatAnswer(
                chat_format.parser(tool_names=body.tool_names, prompt=prompt_tail, special_tokens=special_tokens),
                one_call_only=body.parallel_tool_calls is False,
            )
            for _ in range(body.n or 1)
        ]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = Envelope(body, model, kind=kind, request_id=request_id)

    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:  # noqa: ARG002
        """See Job.events."""
        match message.WhichOneof("event"):
            case "started":
                started = message.started
                self._envelope.usage.add_prompt(started.num_prompt_tokens, started.num_cached_tokens)
                choices = [_delta(index, {"role": "assistant", "content": ""}) for index in range(len(self._answers))]
            case "chunk":
                self._envelope.usage.num_output_tokens += message.chunk.num_tokens
                choices = self._chunk_choices(message.chunk)
            case _:
                finished = message.finished
                index = finished.answer_index
                answer = self._answers[index]
                choices = [_delta(index, delta_object(delta)) for delta in answer.finish()]
                choices.append(_finish(_delta(index, {}), finished, has_calls=answer.has_calls))
        return [self._envelope.event(choice) for choice in choices]

    def last_events(self) -> list[JsonObject]:
        """See Job.last_events."""
        return self._envelope.last_events()

    def whole(self, responses: Sequence[pb.GenerateResponse]) -> JsonObject:
        """See Job.whole."""
        (response,) = responses
        choices = []
        for index, answer in enumerate(answers(response)):
            parts = self._answers[index]
            message = message_object([*parts.feed(answer.text), *parts.finish()])
            choice: JsonObject = {"index": index, "message": message, "logprobs": self._logprobs(answer)}
            if self._body.return_token_ids:
                choice["token_ids"] = list(answer.token_ids)
            choices.append(_finish(choice, answer.finished, has_calls=parts.has_calls))
        return self._envelope.whole(choices, responses)

    def _chunk_choices(self, chunk: pb.Chunk) -> list[JsonObject]:
        """One choice per part; what belongs to the tokens goes with the first, and is sent even if no part is ready."""
        deltas = [delta_object(delta) for delta in self._answers[chunk.answer_index].feed(chunk.text)]
        told_of_tokens = chunk.HasField("logprobs") or chunk.token_ids or self._envelope.usage_all_along
        if told_of_tokens and not deltas:
            deltas = [{"content": ""}]
        choices = [_delta(chunk.answer_index, delta) for delta in deltas]
        if choices:
            choices[0]["logprobs"] = self._logprobs(chunk)
            if self._body.return_token_ids:
                choices[0]["token_ids"] = list(chunk.token_ids)
        return choices

    def _logprobs(self, part: pb.Chunk | pb.GenerateResponse | pb.Answer) -> JsonObject | None:
        return chat_logprobs(part.logprobs, self._model.tokenizer) if part.HasField("logprobs") else None


def _delta(index: int, delta: JsonObject) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish(choice: JsonObject, finished: pb.Finished, *, has_calls: bool) -> JsonObject:
    reason = finish_reason(finished)
    if has_calls and reason == "stop":
        reason = "tool_calls"
    return {**choice, "finish_reason": reason, "stop_reason": stop_reason(finished)}
