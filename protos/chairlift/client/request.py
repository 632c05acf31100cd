"""Builds requests of chairlift.v1 from keyword arguments. Only given fields are set; the server has the defaults."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from chairlift.v1 import generation_service_pb2 as pb

_Message = TypeVar("_Message", bound=Message)

ChatTurns = Sequence[tuple[str, str] | Mapping[str, Any] | pb.ChatMessage]
"""A conversation, oldest turn first: (role, content), OpenAI's {"role": ..., "content": ...}, or a ChatMessage."""


class GenerationOptions(TypedDict, total=False):
    """Options of `generate` and `stream`. Names, ranges and defaults are those of generation_service.proto.

    Exceptions: `return_text` and `return_token_ids` are OutputOptions.text and OutputOptions.token_ids;
    `time_budget_s`, `ttft_s`, `inter_token_s`, `tools` and `template_variables` take Python values. None: not given.
    """

    token_ids: Sequence[int] | None  # instead of a text
    chat: ChatTurns | None  # instead of a text
    tools: Sequence[Mapping[str, Any]] | None  # these four need a chat
    template_variables: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
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
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None

    json_schema: Mapping[str, Any] | str | None  # structured output: at most one of these five
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None

    max_tokens: int | None
    min_tokens: int | None
    stop_texts: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_text: bool | None
    ignore_end_token: bool | None
    time_budget_s: float | None

    ttft_s: float | None  # latency targets
    inter_token_s: float | None
    min_tokens_per_second: float | None
    service_class: str | None
    retry_ticket: bytes | None  # of GenerationError

    return_text: bool | None
    return_token_ids: bool | None
    top_logprobs: int | None
    keep_special_tokens: bool | None
    prompt_logprobs: int | None
    echo: bool | None
    parse: bool | None


PROMPT_FORMS = ("text", "token_ids", "chat")
_SPEC_FIELDS = ("model", "request_id", "priority", "cache_salt", "num_answers")
_CHAT_FIELDS = ("tools", "template_variables", "add_generation_prompt", "continue_final_message")
_FORMATS = ("json_schema", "json_object", "regex", "choice", "grammar")
_TARGETS = ("ttft_s", "inter_token_s", "min_tokens_per_second", "service_class", "retry_ticket")
_TEXT_LISTS = ("stop_texts", "bad_words", "choice")
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}  # of whole numbers

_STOP_FIELDS = tuple(name for name in pb.StopOptions.DESCRIPTOR.fields_by_name if name != "time_budget")
_OUTPUT_FIELDS = {
    "return_text": "text",
    "return_token_ids": "token_ids",
    "top_logprobs": "top_logprobs",
    "keep_special_tokens": "keep_special_tokens",
    "prompt_logprobs": "prompt_logprobs",
    "echo": "echo",
    "parse": "parse",
}


def generation_spec(text: str | None, options: GenerationOptions) -> pb.GenerationSpec:
    """Builds the request of `generate` and `stream`.

    Raises:
        TypeError: an unknown argument, not exactly one of text, token_ids and chat, more than one structured-output
            format, a chat option without a chat, or a value of the wrong type; names the argument.
        ValueError: a value that its field cannot hold; names the argument.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if text is not None:
        if not isinstance(text, str):
            raise TypeError(f"text is of type {type(text).__name__}; give token ids as token_ids, a chat as chat")
        given["text"] = text
    for name in _TEXT_LISTS:
        if isinstance(given.get(name), str):  # protobuf would store its letters
            raise TypeError(f"{name} is one text; give a list of texts")
    prompts = [name for name in PROMPT_FORMS if name in given]
    if len(prompts) != 1:
        raise TypeError(f"give exactly one of {', '.join(PROMPT_FORMS)}, not {' and '.join(prompts) or 'none'}")
    spec = _message(pb.GenerationSpec, {name: given.pop(name) for name in _SPEC_FIELDS if name in given})
    if "text" in given:
        spec.text = given.pop("text")
    elif "token_ids" in given:
        spec.token_ids.SetInParent()  # an empty list still selects this form
        try:
            spec.token_ids.ids.extend(given.pop("token_ids"))
        except (TypeError, ValueError) as error:
            raise type(error)(f"token_ids: {error}") from error
    else:
        spec.chat.CopyFrom(chat_prompt(given.pop("chat"), _take(given, _CHAT_FIELDS)))
    formats = _take(given, _FORMATS)
    if formats:
        spec.structured_output.CopyFrom(_structured_output(formats))
    spec.sampling.CopyFrom(_message(pb.SamplingOptions, _take(given, pb.SamplingOptions.DESCRIPTOR.fields_by_name)))
    spec.stop.CopyFrom(_message(pb.StopOptions, _take(given, _STOP_FIELDS)))
    if "time_budget_s" in given:
        spec.stop.time_budget.CopyFrom(_duration("time_budget_s", given.pop("time_budget_s")))
    targets = _take(given, _TARGETS)
    if targets:
        for name in ("ttft_s", "inter_token_s"):
            if name in targets:
                targets[name.removesuffix("_s")] = _duration(name, targets.pop(name))
        spec.latency_targets.CopyFrom(_message(pb.LatencyTargets, targets))
    output = {_OUTPUT_FIELDS[name]: value for name, value in _take(given, _OUTPUT_FIELDS).items()}
    spec.output.CopyFrom(_message(pb.OutputOptions, output))
    if not given.keys().isdisjoint(_CHAT_FIELDS):
        raise TypeError(f"{next(name for name in _CHAT_FIELDS if name in given)} needs a chat, and there is none")
    if given:
        known = ", ".join(("text", *GenerationOptions.__annotations__))
        raise TypeError(f"unknown argument {sorted(given)[0]!r}; known: {known}")
    return spec


def count_request(
    text: str | None, chat: ChatTurns | None, model: str | None, return_token_ids: bool
) -> pb.CountTokensRequest:
    """Builds the request of `count_tokens`.

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


def chat_prompt(turns: ChatTurns, options: Mapping[str, Any] | None = None) -> pb.ChatPrompt:
    """Builds the message of a conversation.

    Args:
        turns: its turns.
        options: the chat's options, by their names in GenerationOptions.

    Raises:
        TypeError: a turn is none of the forms of ChatTurns.
        ValueError: the tools or the variables cannot be encoded as JSON.
    """
    given = dict(options or {})
    chat = pb.ChatPrompt(messages=[_turn(turn) for turn in turns])
    chat.tools_json.extend(_json("tools", tool) for tool in given.pop("tools", ()))
    if "template_variables" in given:
        chat.template_variables_json = _json("template_variables", given.pop("template_variables"))
    chat.MergeFrom(_message(pb.ChatPrompt, given))
    return chat


def _turn(turn: object) -> pb.ChatMessage:
    if isinstance(turn, pb.ChatMessage):
        return turn
    if isinstance(turn, Mapping):
        return _turn_of_openai(turn)
    if isinstance(turn, tuple | list) and len(turn) == 2:
        return _message(pb.ChatMessage, {"role": turn[0], "content": turn[1]})
    raise TypeError(f"chat has {turn!r}; a turn is (role, content), a dictionary or a ChatMessage")


def _turn_of_openai(turn: Mapping[str, Any]) -> pb.ChatMessage:
    """Converts a message in OpenAI's format. Members that are None count as absent."""
    given = {name: value for name, value in turn.items() if value is not None}
    values = _take(given, ("role", "content", "name", "reasoning", "tool_call_id"))
    if "reasoning_content" in given:
        values["reasoning"] = given.pop("reasoning_content")
    if "role" not in values:
        raise TypeError(f"chat has {turn!r}; a turn has a role")
    try:
        calls = [
            pb.ToolCall(id=call["id"], name=call["function"]["name"], arguments_json=call["function"]["arguments"])
            for call in given.pop("tool_calls", ())
        ]
    except (KeyError, TypeError) as error:
        raise TypeError(f"chat has a turn whose tool_calls are not in OpenAI's format: {error!r}") from error
    if given:
        raise TypeError(f"chat has a turn with {sorted(given)[0]!r}, which is not known or not served")
    return _message(pb.ChatMessage, {**values, "tool_calls": calls})


def _structured_output(formats: dict[str, Any]) -> pb.StructuredOutput:
    if len(formats) > 1:
        raise TypeError(f"give at most one of {', '.join(_FORMATS)}, not {' and '.join(formats)}")
    ((name, value),) = formats.items()
    if name == "json_schema":
        value = value if isinstance(value, str) else _json(name, value)
    if name == "choice":
        value = pb.Choices(texts=value)
    return _message(pb.StructuredOutput, {name: value})


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be encoded as JSON: {error}") from error


def _duration(name: str, seconds: float) -> Duration:
    duration = Duration()
    try:
        duration.FromNanoseconds(round(seconds * 1e9))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {seconds}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{name} is {seconds!r}, it must be a number") from error
    return duration


def _message(kind: Callable[..., _Message], values: Mapping[str, Any]) -> _Message:
    # One field at a time: protobuf's own error does not name the field.
    for name, value in values.items():
        try:
            kind(**{name: value})
        except ValueError as error:
            bounds = _BOUNDS.get(kind().DESCRIPTOR.fields_by_name[name].cpp_type)
            if bounds is None or not isinstance(value, int):
                raise ValueError(f"{name} is {value}: {error}") from error
            raise ValueError(f"{name} is {value}, it must be between {bounds[0]} and {bounds[1]}") from error
        except TypeError as error:
            raise TypeError(f"{name} is {value!r}: {error}") from error
    return kind(**values)


def _take(given: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}
