"""Keyword arguments to request messages of chairlift.v1; only what is given is set, the server owns the defaults."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from chairlift.v1 import generation_service_pb2 as pb

DEFAULT_TARGET = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 16 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

_Message = TypeVar("_Message")

ChatTurns = Sequence[tuple[str, str]]
"""A conversation: (role, content) of each turn, oldest first."""


class GenerationOptions(TypedDict, total=False):
    """What `generate` and `stream` take besides the text. Names, ranges and defaults are those of
    generation_service.proto.

    Two names differ where the proto's would be said twice: `return_text` and `return_token_ids` are OutputOptions.text
    and OutputOptions.token_ids. None is the same as not given.
    """

    token_ids: Sequence[int] | None  # instead of the text
    chat: ChatTurns | None  # instead of the text
    model: str | None
    request_id: str | None
    priority: int | None
    cache_salt: str | None
    num_answers: int | None

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None

    max_tokens: int | None
    min_tokens: int | None
    stop_texts: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_text: bool | None
    ignore_end_token: bool | None

    return_text: bool | None
    return_token_ids: bool | None
    top_logprobs: int | None
    keep_special_tokens: bool | None


PROMPT_FORMS = ("text", "token_ids", "chat")
_SPEC_FIELDS = ("model", "request_id", "priority", "cache_salt", "num_answers")
_OUTPUT_FIELDS = {
    "return_text": "text",
    "return_token_ids": "token_ids",
    "top_logprobs": "top_logprobs",
    "keep_special_tokens": "keep_special_tokens",
}


def generation_spec(text: str | None, options: GenerationOptions) -> pb.GenerationSpec:
    """The request that these arguments say.

    Raises:
        TypeError: an unknown argument, or not exactly one of text, token_ids and chat.
        ValueError: a number that its field cannot hold; names the argument.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if text is not None:
        given["text"] = text
    prompts = [name for name in PROMPT_FORMS if name in given]
    if len(prompts) != 1:
        raise TypeError(f"give exactly one of {', '.join(PROMPT_FORMS)}, not {' and '.join(prompts) or 'none'}")
    spec = _message(pb.GenerationSpec, {name: given.pop(name) for name in _SPEC_FIELDS if name in given})
    if "text" in given:
        spec.text = given.pop("text")
    elif "token_ids" in given:
        spec.token_ids.ids.extend(given.pop("token_ids"))
        spec.token_ids.SetInParent()  # an empty list is still the prompt form that was chosen
    else:
        spec.chat.CopyFrom(chat_prompt(given.pop("chat")))
    spec.sampling.CopyFrom(_message(pb.SamplingOptions, _take(given, pb.SamplingOptions.DESCRIPTOR.fields_by_name)))
    spec.stop.CopyFrom(_message(pb.StopOptions, _take(given, pb.StopOptions.DESCRIPTOR.fields_by_name)))
    output = {_OUTPUT_FIELDS[name]: value for name, value in _take(given, _OUTPUT_FIELDS).items()}
    spec.output.CopyFrom(_message(pb.OutputOptions, output))
    if given:
        known = ", ".join(("text", *GenerationOptions.__annotations__))
        raise TypeError(f"unknown argument {sorted(given)[0]!r}; known: {known}")
    return spec


def count_request(
    text: str | None, chat: ChatTurns | None, model: str | None, return_token_ids: bool
) -> pb.CountTokensRequest:
    """The request of `count_tokens`.

    Raises:
        TypeError: not exactly one of text and chat.
    """
    if (text is None) == (chat is None):
        raise TypeError("give exactly one of text, chat")
    request = pb.CountTokensRequest(model=model or "", return_token_ids=return_token_ids)
    if text is not None:
        request.text = text
    if chat is not None:
        request.chat.CopyFrom(chat_prompt(chat))
    return request


def chat_prompt(turns: ChatTurns) -> pb.ChatPrompt:
    """A conversation as its message."""
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


def _message(kind: Callable[..., _Message], values: Mapping[str, Any]) -> _Message:
    # One field at a time: protobuf's own error does not say which one it is about.
    for name, value in values.items():
        try:
            kind(**{name: value})
        except ValueError as error:
            raise ValueError(f"{name} is {value}: {error}") from error
    return kind(**values)


def _take(given: dict[str, Any], names: Mapping[str, object]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}
