"""Checked generation requests with defaults filled in. `convert.py` creates them from the public proto."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chairlift.service.sampling_fields import DEFAULT_MAX_TOKENS, SamplingOptions, StopOptions, seed_of_answer
from chairlift.service.structured.output_constraint import OutputConstraint
from frontend.request.prompt_options import PromptOptions
from frontend.text.chat.messages import ChatMessage, ChatOptions
from frontend.types import LatencyTargets


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
    """A conversation, to be rendered with the model's template."""

    messages: tuple[ChatMessage, ...]
    options: ChatOptions = field(default_factory=ChatOptions)

    @property
    def num_chars(self) -> int:
        """Number of characters that the template may insert."""
        return sum(turn.num_chars for turn in self.messages) + self.options.num_chars


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the answer contains.

    Attributes:
        top_logprobs: alternatives per token; None: no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens.
        echo: whether to return the prompt's text, and its token ids if `token_ids` is set.
        parse: whether to separate reasoning and tool calls from the text.
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
        constraint: structured output that the answers must match; None: unconstrained.
        prompt_only: whether only the prompt is returned. `stop.max_tokens` is then 1, because the engine computes a
            prompt only to generate a token.
        adapter, adapter_sha256: name of the adapter of the model, and digest of its files; empty: without.
        targets: latency targets; None: none were set, and there are no service classes.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingOptions
    stop: StopOptions
    output: OutputOptions
    priority: int
    cache_salt: str
    num_answers: int
    constraint: OutputConstraint | None = None
    prompt_only: bool = False
    adapter: str = ""
    adapter_sha256: bytes = b""
    targets: LatencyTargets | None = None

    @property
    def continues_text(self) -> bool:
        """Whether answers continue the text of the prompt; an answer to a conversation starts a text of its own.

        A constrained answer has the text that its constraint has seen, which counts a space at the start.
        """
        is_own = isinstance(self.prompt, ChatPrompt) and not self.prompt.options.continue_final_message
        return not is_own or self.constraint is not None


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """What a request over HTTP asks for that its GenerationSpec cannot express.

    Attributes:
        chat: the conversation that is the prompt; None: the spec has the prompt.
        constraint: structured-output format of the answers; None: that of the spec, if it has one.
        default_max_tokens: max_tokens if the spec sets none; the context length applies too.
        prompt_options: options of tokenization.
    """

    chat: ChatPrompt | None = None
    constraint: OutputConstraint | None = None
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    prompt_options: PromptOptions = field(default_factory=PromptOptions)


def nth_answer(request: GenerationRequest, index: int) -> GenerationRequest:
    """Returns the request for answer `index` alone, with its own seed.

    Only answer 0 returns the prompt, and only answer 0 may be refused for its targets: the others are submitted after
    its first token, when the client has been promised all of them.
    """
    sampling = replace(request.sampling, seed=seed_of_answer(request.sampling.seed, index))
    output, targets = request.output, request.targets
    if index:
        output = replace(output, prompt_logprobs=None, echo=False)
        if targets is not None and targets.when_infeasible == "refuse":
            targets = replace(targets, when_infeasible="wait")
    return replace(request, sampling=sampling, output=output, targets=targets, num_answers=1)
