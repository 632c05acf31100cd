"""Response of /v1/completions: events and response object."""

from collections.abc import Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.errors import BodyError
from frontend.api.http.generation_spec import NO_LIMIT
from frontend.api.http.response_builder import JsonObject, finish_reason
from frontend.api.openai.choices_builder import ChoicesBuilder, answers, end_fields, prompt_fields
from frontend.api.openai.completion_bodies import CompletionBody
from frontend.api.openai.generation_spec import DEFAULT_COMPLETION_TOKENS
from frontend.api.openai.logprobs import (
    TextOffsets,
    completion_logprobs,
    echo_logprobs,
    joined_columns,
)
from frontend.limits import MAX_CALL_PROMPT_LOGPROBS
from frontend.request.request import RequestExtras
from frontend.slices import Sliced, at_once
from frontend.text.served_model import ServedModel


class CompletionBuilder(ChoicesBuilder):
    """Builds the response to one call of /v1/completions. Choice i * n + k is answer k to prompt i.

    Args:
        body: request body.
        specs: its GenerationSpecs; see `completion_specs`.
        model: the served model.
        request_id: of the call.

    Raises:
        BodyError: more than one output constraint.
    """

    parses_answers = False

    def __init__(
        self, body: CompletionBody, specs: Sequence[pb.GenerationSpec], model: ServedModel, request_id: str
    ) -> None:
        max_tokens = NO_LIMIT if body.is_unlimited else DEFAULT_COMPLETION_TOKENS
        extras = RequestExtras(None, body.output_constraint(), max_tokens, body.prompt_options)
        super().__init__(body, specs, model, request_id, extras=extras, kind="text_completion")
        self._body = body
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._num_prompt_logprobs = 0

    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:
        """See EventBuilder.events."""
        first_choice = prompt_index * self._num_answers
        match message.WhichOneof("event"):
            case "started":
                started = message.started
                self._usage.add_prompt(started.num_prompt_tokens, started.num_cached_tokens)
                return self._first_events(prompt_index, started.prompt)
            case "chunk":
                chunk = message.chunk
                self._usage.num_output_tokens += chunk.num_tokens
                index = first_choice + chunk.answer_index
                choice = _choice(index, chunk.text, at_once(self._logprobs(index, chunk)))
                if self._body.return_token_ids:
                    choice["token_ids"] = list(chunk.token_ids)
                elif not chunk.text and choice["logprobs"] is None and not self._usage_in_every_event:
                    return []
                return [self._event(choice)]
        finished = message.finished
        choice = _choice(first_choice + finished.answer_index, "")
        return [self._event(_finish(choice, finished))]

    def response(self, responses: Sequence[pb.GenerateResponse]) -> Sliced[JsonObject]:
        """See ResponseBuilder.response."""
        choices: list[JsonObject] = []
        for prompt_index, response in enumerate(responses):
            echo, columns = self._echo(prompt_index, response.prompt)
            of_prompt = prompt_fields(self._body, response.prompt, self._model.tokenizer)
            for answer in answers(response):
                index = len(choices)
                self._offsets[index] = TextOffsets(len(echo))
                logprobs = joined_columns(columns, (yield from self._logprobs(index, answer)))
                choice = _choice(index, echo + answer.text, logprobs) | of_prompt
                if self._body.return_token_ids:
                    choice["token_ids"] = list(answer.token_ids)
                choices.append(_finish(choice, answer.finished))
                yield
        return (yield from self._whole(choices, responses))

    def _first_events(self, prompt_index: int, prompt: pb.PromptEcho) -> list[JsonObject]:
        """Returns the echo of a prompt, once for each of its choices."""
        echo, columns = self._echo(prompt_index, prompt)
        first = prompt_index * self._num_answers
        indices = range(first, first + self._num_answers)
        self._offsets.update((index, TextOffsets(len(echo))) for index in indices)
        if not (self._body.echo or self._body.return_token_ids):
            return []
        of_prompt = prompt_fields(self._body, prompt, self._model.tokenizer)
        return [self._event(_choice(index, echo, columns) | of_prompt) for index in indices]

    def _logprobs(self, index: int, part: pb.Chunk | pb.GenerateResponse | pb.Answer) -> Sliced[JsonObject | None]:
        if not part.HasField("logprobs"):
            return None
        token_ids = part.token_ids if self._body.return_tokens_as_token_ids else None
        return (yield from completion_logprobs(part.logprobs, self._model.tokenizer, self._offsets[index], token_ids))

    def _echo(self, prompt_index: int, prompt: pb.PromptEcho) -> tuple[str, JsonObject | None]:
        """Returns the echoed text of a prompt and the columns of its log-probabilities, if requested.

        Raises:
            BodyError: the echoes or log-probabilities of all prompts exceed a limit.
        """
        self._num_prompt_logprobs += self._num_answers * (len(prompt.logprobs.chosen) + len(prompt.logprobs.top_values))
        if self._num_prompt_logprobs > MAX_CALL_PROMPT_LOGPROBS:
            raise BodyError(
                400,
                f"the prompts have more than {MAX_CALL_PROMPT_LOGPROBS} log-probabilities, the most for one call",
                param="prompt",
            )
        spec = self.specs[prompt_index]
        is_whole_text = spec.WhichOneof("prompt") == "text" and self._body.truncate_prompt_tokens is None
        text = (spec.text if is_whole_text else prompt.text) if self._body.echo else ""
        self._count_echo(self._num_answers * (len(text) + len(prompt.token_ids)), echo=self._body.echo)
        if not self._body.echo:
            return "", None
        if self._body.logprobs is None or not prompt.HasField("logprobs"):
            return text, None
        by_id = bool(self._body.return_tokens_as_token_ids)
        return text, echo_logprobs(prompt, self._model.tokenizer, text, by_id=by_id)


def _choice(index: int, text: str, logprobs: JsonObject | None = None) -> JsonObject:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


def _finish(choice: JsonObject, finished: pb.Finished) -> JsonObject:
    return {**choice, "finish_reason": finish_reason(finished), **end_fields(finished)}
