"""A request as the frontend knows it once it has been checked: frozen, every default that needs no model filled in.

Made by `convert.py` from the public proto; read by everything behind it. Knows no proto and no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from frontend.text.chat.messages import ChatMessage, ChatOptions
from frontend.text.structured.output_format import OutputForm

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: any few multiples lie far apart


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, each below the model's vocab_size."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's own template."""

    messages: tuple[ChatMessage, ...]
    options: ChatOptions = field(default_factory=ChatOptions)

    @property
    def num_chars(self) -> int:
        """Characters of everything the template may show."""
        return sum(turn.num_chars for turn in self.messages) + self.options.num_chars


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn, all values in force. Names and ranges are those of the public proto.

    Attributes:
        logit_bias: (token id, bias) pairs in order of their ids.
        allowed_token_ids: if not empty, only these are drawn; in order, each once.
        bad_words: texts that are never written.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StopOptions:
    """When an answer ends.

    Attributes:
        max_tokens: None: as many as fit, up to the default limit; decided when the prompt's length is known. 0: the
            prompt is all that is asked about.
        time_budget_s: how long after its acceptance it ends with what there is; None: no such end.
    """

    max_tokens: int | None
    min_tokens: int
    stop_texts: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_text: bool
    ignore_end_token: bool
    time_budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What comes back.

    Attributes:
        top_logprobs: alternatives per token; None: no log-probabilities at all.
        prompt_logprobs: the same for the prompt's tokens.
        echo: the prompt's text too, and its token ids if `token_ids` is set.
        parse: reasoning and tool calls apart from the text.
    """

    text: bool
    token_ids: bool
    top_logprobs: int | None
    keep_special_tokens: bool
    prompt_logprobs: int | None = None
    echo: bool = False
    parse: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One checked generation request.

    Attributes:
        form: what its answers are held to; None: they are free.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingOptions
    stop: StopOptions
    output: OutputOptions
    priority: int
    cache_salt: str
    num_answers: int
    form: OutputForm | None = None


def with_max_tokens(request: GenerationRequest, max_tokens: int) -> GenerationRequest:
    """The request with its length limit decided."""
    return replace(request, stop=replace(request.stop, max_tokens=max_tokens))


def with_special_tokens(request: GenerationRequest) -> GenerationRequest:
    """The request with special tokens kept in the answer's text."""
    return replace(request, output=replace(request.output, keep_special_tokens=True))


def nth_answer(request: GenerationRequest, index: int) -> GenerationRequest:
    """The request for one answer that draws answer `index` of `request`: the same one with a seed of its own. The
    prompt is asked about once, with answer 0.

    The proto publishes the derivation. Adding a large odd number keeps the seeds of one request apart, and apart from
    those of requests with neighbouring seeds.
    """
    seed = (request.sampling.seed + index * _SEED_STEP) % 2**64
    output = replace(request.output, prompt_logprobs=None, echo=False) if index else request.output
    return replace(request, sampling=replace(request.sampling, seed=seed), output=output, num_answers=1)
