"""Response of /v1/responses: GenerationSpec, events and response object."""

import struct
import time
from typing import Any

from chairlift.service.structured.output_constraint import OutputConstraint
from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.errors import RESPONSES_PARAMS, error_object
from frontend.api.http.generation_spec import NO_LIMIT, sampling_spec
from frontend.api.http.response_builder import JsonObject, SingleAnswerBuilder, finish_reason
from frontend.api.openai.logprobs import LogprobRows
from frontend.api.openai.responses.bodies import ResponsesBody
from frontend.api.openai.responses.output_items import OutputItems
from frontend.api.openai.responses.tools import ignored_type
from frontend.errors import QueueFull
from frontend.request.request import ChatPrompt
from frontend.text.served_model import ServedModel


class ResponseObjectBuilder(SingleAnswerBuilder):
    """Builds the response to one call.

    Args:
        body: request body.
        model: the served model.
        request_id: of the call, without a prefix.
        chat: the conversation.
        constraint: what the answer must match; None: free text.
    """

    def __init__(
        self,
        body: ResponsesBody,
        model: ServedModel,
        request_id: str,
        *,
        chat: ChatPrompt,
        constraint: OutputConstraint | None,
    ) -> None:
        super().__init__(
            _spec(body, f"resp_{request_id}"),
            chat=chat,
            constraint=constraint,
            max_tokens=body.max_output_tokens or NO_LIMIT,
            one_call=body.tool_use.one_call,
        )
        self._model = model
        self._items = OutputItems(
            request_id,
            with_logprobs=body.logprobs is not None,
            with_summary=body.with_summary,
            with_encrypted=body.with_encrypted_reasoning,
        )
        self._head = _head(body, model, self.request_id)
        self._end: JsonObject = {"status": "in_progress"}
        self._num_events = 0

    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:  # noqa: ARG002
        """See EventBuilder.events."""
        match message.WhichOneof("event"):
            case "started":
                sampling = message.started.effective_sampling
                self._head |= {"temperature": _shortest(sampling.temperature), "top_p": _shortest(sampling.top_p)}
                events = [self._lifecycle("created"), self._lifecycle("in_progress")]
            case "chunk":
                chunk = message.chunk
                if chunk.HasField("logprobs"):
                    self._items.add_logprobs(list(LogprobRows(chunk.logprobs, self._model.tokenizer)))
                events = [event for step in self._blocks.take(chunk) for event in self._items.events(step)]
            case _:
                events = self._finish(message.finished)
        return self._numbered(events)

    def failure_events(self, error: Exception) -> list[JsonObject]:
        """See EventBuilder.failure_events. `error` has the HTTP error object; `response.failed` ends the stream."""
        details = error_object(error, RESPONSES_PARAMS).body["error"]
        code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
        self._end = {"status": "failed", "error": {"code": code, "message": details["message"]}}
        flat = {"type": "error", "code": details["code"], "message": details["message"], "param": details["param"]}
        return self._numbered([{**flat, "error": details}, self._lifecycle("failed")])

    def answer(self) -> JsonObject:
        """See SingleAnswerBuilder.answer."""
        return {**self._head, **self._end, "output": self._items.output}

    def _finish(self, finished: pb.Finished) -> list[JsonObject]:
        is_cut_off = finish_reason(finished) == "length"
        steps = self._blocks.close()
        events = [event for step in steps for event in self._items.events(step, is_cut_off=is_cut_off)]
        self._end = {"status": "incomplete" if is_cut_off else "completed", "usage": _usage(finished.usage)}
        if is_cut_off:
            self._end["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._end["completed_at"] = int(time.time())
        return [*events, self._lifecycle(self._end["status"])]

    def _lifecycle(self, what: str) -> JsonObject:
        return {"type": f"response.{what}", "response": self.answer()}

    def _numbered(self, events: list[JsonObject]) -> list[JsonObject]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events


def _spec(body: ResponsesBody, request_id: str) -> pb.GenerationSpec:
    spec = sampling_spec(body, request_id)
    if body.logprobs is not None:
        spec.output.top_logprobs = body.logprobs
    return spec


def _head(body: ResponsesBody, model: ServedModel, request_id: str) -> JsonObject:
    """Returns the fields of the response object that repeat the request."""
    text, reasoning = body.text, body.reasoning
    text_format = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
    if text_format["type"] != "json_schema":
        text_format = {"type": text_format["type"]}
    return {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text_format},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_tool(tool) for tool in body.tools or () if not ignored_type(tool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _shortest(number: float) -> float:
    """Returns a 32-bit float of the proto as it was written: 0.8, not 0.800000011920929."""
    texts = (f"{number:.{digits}g}" for digits in range(6, 10))  # 9 digits identify every 32-bit float
    return float(next(text for text in texts if struct.pack("f", float(text)) == struct.pack("f", number)))


def _tool(tool: dict[str, Any]) -> JsonObject:
    return {"description": None, "parameters": None, "strict": None, **tool}


def _usage(usage: pb.Usage) -> JsonObject:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
