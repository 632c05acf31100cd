"""A request as the frontend knows it once it has been checked: frozen, every default that needs no model filled in.

Made by `convert.py` from the public proto; read by everything behind it. Knows no proto and no engine.
"""

from dataclasses import dataclass

from frontend.chat_template import ChatMessage


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, each below the model's vocab_size."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's own template."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn, all values in force. Names and ranges are those of the public proto.

    Attributes:
        logit_bias: (token id, bias) pairs in order of their ids.
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


@dataclass(frozen=True, slots=True)
class StopOptions:
    """When an answer ends.

    Attributes:
        max_tokens: None: as many as fit, up to the default limit; decided when the prompt's length is known.
    """

    max_tokens: int | None
    min_tokens: int
    stop_texts: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_text: bool
    ignore_end_token: bool


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What comes back.

    Attributes:
        top_logprobs: alternatives per token; None: no log-probabilities at all.
    """

    text: bool
    token_ids: bool
    top_logprobs: int | None
    keep_special_tokens: bool


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One checked generation request."""

    request_id: str
    prompt: Prompt
    sampling: SamplingOptions
    stop: StopOptions
    output: OutputOptions
    priority: int
    cache_salt: str
