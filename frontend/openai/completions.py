"""The answers of /v1/completions."""

from collections.abc import Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.openai.bodies import CompletionBody
from frontend.openai.job import Envelope, JsonObject, answers, finish_reason, stop_reason
from frontend.openai.logprobs import completion_logprobs
from frontend.openai.spec import DEFAULT_COMPLETION_TOKENS, completion_specs
from frontend.served_model import ServedModel


class Completion:
    """One call of /v1/completions. Choice i * n + k is answer k to prompt i.

    Args:
        body: what is asked.
        model: what answers.
        request_id: of the call.

    Raises:
        BodyError: parameters that do not go together.
    """

    chat = None
    default_max_tokens = DEFAULT_COMPLETION_TOKENS

    def __init__(self, body: CompletionBody, model: ServedModel, request_id: str) -> None:
        self.request_id = request_id
        self.specs = completion_specs(body, request_id)
        self._body = body
        self._model = model
        self._num_answers = body.n or 1
        self._envelope = Envelope(body, model, kind="text_completion", request_id=request_id)
        self._text_offsets: dict[int, int] = {}  # by choice, for log-probabilities

    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:
        """See Job.events."""
        first_choice = prompt_index * self._num_answers
        match message.WhichOneof("event"):
            case "started":
                started = message.started
                self._envelope.usage.add_prompt(started.num_prompt_tokens, started.num_cached_tokens)
                if not self._body.echo:
                    return []
                echo = self._echo(prompt_index)
                choices = [_choice(first_choice + index, echo) for index in range(self._num_answers)]
                return [self._envelope.event(choice) for choice in choices]
            case "chunk":
                chunk = message.chunk
                self._envelope.usage.num_output_tokens += chunk.num_tokens
                index = first_choice + chunk.answer_index
                choice = _choice(index, chunk.text, self._logprobs(index, chunk))
                if self._body.return_token_ids:
                    choice["token_ids"] = list(chunk.token_ids)
                elif not chunk.text and choice["logprobs"] is None and not self._envelope.usage_all_along:
                    return []
                return [self._envelope.event(choice)]
        finished = message.finished
        choice = _choice(first_choice + finished.answer_index, "")
        return [self._envelope.event(_finish(choice, finished))]

    def last_events(self) -> list[JsonObject]:
        """See Job.last_events."""
        return self._envelope.last_events()

    def whole(self, responses: Sequence[pb.GenerateResponse]) -> JsonObject:
        """See Job.whole."""
        choices: list[JsonObject] = []
        for prompt_index, response in enumerate(responses):
            echo = self._echo(prompt_index) if self._body.echo else ""
            for answer in answers(response):
                index = len(choices)
                choice = _choice(index, echo + answer.text, self._logprobs(index, answer))
                if self._body.return_token_ids:
                    choice["token_ids"] = list(answer.token_ids)
                choices.append(_finish(choice, answer.finished))
        return self._envelope.whole(choices, responses)

    def _logprobs(self, index: int, part: pb.Chunk | pb.GenerateResponse | pb.Answer) -> JsonObject | None:
        if not part.HasField("logprobs"):
            return None
        offset = self._text_offsets.get(index, 0)
        columns = completion_logprobs(part.logprobs, self._model.tokenizer, offset)
        self._text_offsets[index] = offset + sum(len(text) for text in columns["tokens"])
        return columns

    def _echo(self, prompt_index: int) -> str:
        spec = self.specs[prompt_index]
        if spec.WhichOneof("prompt") == "text":
            return spec.text
        detokenizer = self._model.tokenizer.detokenizer(keep_special_tokens=True)
        return detokenizer.push(spec.token_ids.ids) + detokenizer.finish()


def _choice(index: int, text: str, logprobs: JsonObject | None = None) -> JsonObject:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


def _finish(choice: JsonObject, finished: pb.Finished) -> JsonObject:
    return {**choice, "finish_reason": finish_reason(finished), "stop_reason": stop_reason(finished)}
