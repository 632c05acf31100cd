"""Echo of a prompt: its text, its token ids and their log-probabilities."""

from collections.abc import Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest
from frontend.generation.answer.token_logprobs import token_logprobs
from frontend.limits import MAX_ECHO_BYTES, MAX_PROMPT_LOGPROBS
from frontend.request.request import OutputOptions
from frontend.routing.logprobs import PromptLogprobs
from frontend.slices import Sliced, pieces
from frontend.text.tokenizer import Tokenizer

_TOKENS_AT_ONCE = 256


class PromptEcho:
    """The echo of one prompt.

    Args:
        output: says which parts are requested.
        prompt_ids: the prompt as submitted to the engine.
        tokenizer: the model's.

    Raises:
        InvalidRequest: it exceeds the size of a message.

    Attributes:
        message: for the client; log-probabilities are added later.
    """

    def __init__(self, output: OutputOptions, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self.message = pb.PromptEcho()
        if output.prompt_logprobs is not None:
            per_token = 1 + output.prompt_logprobs
            if len(prompt_ids) * per_token > MAX_PROMPT_LOGPROBS:
                raise InvalidRequest(
                    f"prompt_logprobs requests {len(prompt_ids) * per_token} log-probabilities, {per_token} for each "
                    f"of {len(prompt_ids)} prompt tokens; at most {MAX_PROMPT_LOGPROBS} are sent",
                    field="spec.output.prompt_logprobs",
                )
        if output.echo:
            self.message.text = tokenizer.text_of(prompt_ids)
        if output.token_ids:
            # In pieces: one call with a million ids would hold the GIL for 0.1 s.
            for piece in pieces(prompt_ids):
                self.message.token_ids.extend(piece)
        if self.message.ByteSize() > MAX_ECHO_BYTES:
            raise InvalidRequest(
                f"echo requests {self.message.ByteSize()} bytes of prompt, at most {MAX_ECHO_BYTES} are sent",
                field="spec.output.echo",
            )

    def add_logprobs(self, columns: PromptLogprobs) -> Sliced[None]:
        """Adds the log-probabilities.

        Args:
            columns: of all tokens but the first.
        """
        logprobs, num_done = self.message.logprobs, 1
        logprobs.top_width = columns.top_width
        for piece in columns.pieces(_TOKENS_AT_ONCE):
            end = num_done + len(piece.chosen)
            logprobs.MergeFrom(token_logprobs(piece, self._prompt_ids[num_done:end], self._tokenizer))
            num_done = end
            yield
