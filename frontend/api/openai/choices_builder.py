"""Shared parts of the responses of completions and chat completions: what is around the choices, usage, timing."""

import time
from collections.abc import Sequence
from typing import ClassVar

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.errors import BodyError, error_object
from frontend.api.http.response_builder import UNNAMED_EVENTS, JsonObject
from frontend.api.openai.completion_bodies import GenerationBody
from frontend.api.openai.logprobs import prompt_logprobs
from frontend.limits import MAX_ECHO_BYTES
from frontend.request.request import RequestExtras
from frontend.slices import Sliced
from frontend.text.served_model import ServedModel
from frontend.text.tokenizer import Tokenizer


class UsageCount:
    """Token usage of a call, over all its prompts and answers.

    Args:
        with_reasoning: whether answers are parsed, so that tokens of reasoning are counted.
    """

    def __init__(self, *, with_reasoning: bool) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0  # of the answers that have ended
        self._with_reasoning = with_reasoning

    def add_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Adds a prompt, once for all its answers."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens

    def as_json(self) -> JsonObject:
        """Returns OpenAI's usage object."""
        usage: JsonObject = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self._with_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage


class ChoicesBuilder:
    """Base of the builders of completions and chat completions: everything around the choices.

    Args:
        body: request body; its stream_options say which events have usage.
        specs: its GenerationSpecs.
        model: the served model.
        request_id: of the call.
        extras: what the specs cannot express.
        kind: value of "object".
    """

    event_format = UNNAMED_EVENTS
    parses_answers: ClassVar[bool]

    def __init__(
        self,
        body: GenerationBody,
        specs: Sequence[pb.GenerationSpec],
        model: ServedModel,
        request_id: str,
        *,
        extras: RequestExtras,
        kind: str,
    ) -> None:
        self.request_id = request_id
        self.extras = extras
        self.specs = specs
        self._model = model
        self._num_answers = body.n or 1
        self._usage = UsageCount(with_reasoning=self.parses_answers)
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._usage_in_every_event = options is not None and bool(options.continuous_usage_stats)
        self._num_echoed_chars = 0
        self._head: JsonObject = {
            "id": request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.weights_revision[:16],
        }

    def last_events(self) -> list[JsonObject]:
        """See EventBuilder.last_events: the usage event, if requested."""
        return [{**self._head, "choices": [], "usage": self._usage.as_json()}] if self._with_usage else []

    def failure_events(self, error: Exception) -> list[JsonObject]:
        """See EventBuilder.failure_events: an error object, which OpenAI's clients raise."""
        return [error_object(error).body]

    def _count_echo(self, num_chars: int, *, echo: bool | None) -> None:
        """Counts characters and token ids of prompts that the response repeats.

        Args:
            echo: whether texts are repeated, not only token ids.

        Raises:
            BodyError: all its choices repeat too many.
        """
        self._num_echoed_chars += num_chars
        if self._num_echoed_chars > MAX_ECHO_BYTES:
            param = "echo" if echo else "return_token_ids"
            raise BodyError(
                400,
                f"{param} requests {self._num_echoed_chars} characters and token ids of prompts in n choices; at most "
                f"{MAX_ECHO_BYTES} are sent",
                param=param,
            )

    def _event(self, choice: JsonObject) -> JsonObject:
        """Returns an event with one choice."""
        event = {**self._head, "choices": [choice]}
        if self._with_usage:
            event["usage"] = self._usage.as_json() if self._usage_in_every_event else None
        return event

    def _whole(self, choices: list[JsonObject], responses: Sequence[pb.GenerateResponse]) -> Sliced[JsonObject]:
        """Returns the response object."""
        for response in responses:
            yield
            usage = response.finished.usage
            self._usage.add_prompt(usage.num_prompt_tokens, usage.num_cached_tokens)
            for answer in answers(response):
                self._usage.num_output_tokens += answer.finished.usage.num_output_tokens
                self._usage.num_reasoning_tokens += answer.finished.usage.num_reasoning_tokens
        return {**self._head, "choices": choices, "usage": self._usage.as_json()}


def answers(response: pb.GenerateResponse) -> list[pb.GenerateResponse | pb.Answer]:
    """Returns all answers of a response, in order."""
    return [response, *response.other_answers]


def end_fields(finished: pb.Finished) -> JsonObject:
    """Returns additional fields of a finished choice: vLLM's `stop_reason` and Chairlift's `timing`."""
    return {"stop_reason": _stop_reason(finished), "timing": _timing_object(finished.timing)}


def prompt_fields(body: GenerationBody, prompt: pb.PromptEcho, tokenizer: Tokenizer) -> JsonObject:
    """Returns vLLM's fields of a prompt, if requested: in each choice of a completion, beside the choices of a chat."""
    fields: JsonObject = {}
    if body.return_token_ids:
        fields["prompt_token_ids"] = prompt.token_ids
    if body.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(prompt, tokenizer)
    return fields


def _stop_reason(finished: pb.Finished) -> str | int | None:
    """Returns the stop text or stop token that ended the answer."""
    match finished.WhichOneof("match"):
        case "stop_text":
            return finished.stop_text
        case "stop_token_id":
            return finished.stop_token_id
    return None


def _timing_object(timing: pb.Timing) -> JsonObject:
    """Returns the latency breakdown in whole microseconds: queued_us to moved_us add up to total_us."""
    durations = {
        "total_us": timing.total,
        "first_token_us": timing.first_token if timing.HasField("first_token") else None,
        "queued_us": timing.queued,
        "tokenized_us": timing.tokenized,
        "prefill_us": timing.prefill,
        "decode_us": timing.decode,
        "parked_us": timing.parked,
        "preempted_us": timing.preempted,
        "moved_us": timing.moved,
    }
    account: JsonObject = {
        name: None if duration is None else duration.ToMicroseconds() for name, duration in durations.items()
    }
    return account | {"num_preemptions": timing.num_preemptions}
