"""What comes back of a prompt: its text, its token ids, the log-probabilities of its tokens."""

from collections.abc import Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.answer.token_logprobs import token_logprobs
from frontend.engine_link.logprobs import LogprobBatch
from frontend.errors import InvalidRequest
from frontend.limits import MAX_ECHO_BYTES, MAX_PROMPT_LOGPROBS
from frontend.model.tokenizer import Tokenizer
from frontend.request.request import OutputOptions


class PromptEcho:
    """One prompt on its way back to who sent it.

    Args:
        output: what is asked for.
        prompt_ids: the prompt as the engine gets it.
        tokenizer: the model's.

    Raises:
        InvalidRequest: it would not fit one message.
    """

    def __init__(self, output: OutputOptions, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._message = pb.PromptEcho()
        if output.prompt_logprobs is not None:
            per_token = 1 + output.prompt_logprobs
            if len(prompt_ids) * per_token > MAX_PROMPT_LOGPROBS:
                raise InvalidRequest(
                    f"prompt_logprobs asks for {len(prompt_ids) * per_token} log-probabilities, {per_token} for each "
                    f"of {len(prompt_ids)} prompt tokens; at most {MAX_PROMPT_LOGPROBS} are sent",
                    field="spec.output.prompt_logprobs",
                )
        if output.echo:
            detokenizer = tokenizer.detokenizer(keep_special_tokens=True)
            self._message.text = detokenizer.push(prompt_ids) + detokenizer.finish()
        if output.token_ids:
            self._message.token_ids.extend(prompt_ids)
        if self._message.ByteSize() > MAX_ECHO_BYTES:
            raise InvalidRequest(
                f"echo asks for {self._message.ByteSize()} bytes of prompt, at most {MAX_ECHO_BYTES} are sent",
                field="spec.output.echo",
            )

    def message(self, columns: LogprobBatch | None) -> pb.PromptEcho:
        """The message.

        Args:
            columns: log-probabilities of all tokens but the first; None: they were not asked for, or never came.
        """
        if columns is not None:
            self._message.logprobs.CopyFrom(token_logprobs(columns, self._prompt_ids[1:], self._tokenizer))
        return self._message
