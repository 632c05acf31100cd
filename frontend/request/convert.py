"""Converts public protos to checked dataclasses. Every field is checked before any work is done for the request.

`with_token_budget` checks what depends on the prompt's length in tokens, after tokenizing.
"""

import uuid
from dataclasses import replace

from chairlift.service.structured.output_constraint import OutputConstraint
from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest, ModelNotFound, RequestTooLong
from frontend.limits import (
    MAX_ANSWERS,
    MAX_ID_CHARS,
    MAX_TOOLS_BYTES,
    MAX_TOP_LOGPROBS,
    MAX_TRUNCATED_CHARS,
)
from frontend.request.checks import check_at_most, check_has_tokens, check_range
from frontend.request.convert_chat import chat_prompt
from frontend.request.convert_structured import check_answer_can_end, output_constraint
from frontend.request.request import ChatPrompt, GenerationRequest, OutputOptions, Prompt, TextPrompt
from frontend.request.sampling import sampling_options, stop_options
from frontend.request.token_prompt import token_prompt
from frontend.slices import at_once
from frontend.text.served_model import ServedModel
from frontend.types import LatencyTargets

MAX_CHARS_PER_TOKEN = 8
"""Prompts with more characters per token of context are rejected before tokenizing. Ordinary text has four or five."""


def generation_request(
    spec: pb.GenerationSpec,
    model: ServedModel,
    given: Prompt | None = None,
    constraint: OutputConstraint | None = None,
    *,
    truncated: bool = False,
    targets: LatencyTargets | None = None,
) -> GenerationRequest:
    """Checks a request and fills in the defaults.

    Args:
        given: the prompt, if it is already checked or the proto cannot express it.
        constraint: the output constraint, in the same cases.
        truncated: whether the prompt will be truncated and may exceed the context.
        targets: its checked latency targets.

    Raises:
        InvalidRequest: a field is invalid.
        ModelNotFound: the request names another model.
    """
    model = named_model(spec.model, model)
    check_at_most("spec.request_id", len(spec.request_id), MAX_ID_CHARS, "characters")
    check_at_most("spec.cache_salt", len(spec.cache_salt), MAX_ID_CHARS, "characters")
    num_answers = spec.num_answers if spec.HasField("num_answers") else 1
    check_range("spec.num_answers", num_answers, 1, MAX_ANSWERS)
    if isinstance(given, ChatPrompt):
        check_chat(given, model, "spec.chat.messages", truncated=truncated)
    stop = stop_options(spec.stop, model, may_be_empty=spec.output.echo or spec.output.HasField("prompt_logprobs"))
    prompt_only = stop.max_tokens == 0
    if prompt_only:
        stop = replace(stop, max_tokens=1)
    constraint = constraint or output_constraint(spec)
    if constraint is not None:
        check_has_tokens(constraint.field, model)
        check_answer_can_end(stop)
    is_chat = isinstance(given, ChatPrompt) or spec.WhichOneof("prompt") == "chat"
    return GenerationRequest(
        request_id=spec.request_id or uuid.uuid4().hex,
        prompt=given or prompt(spec, model, "spec.", truncated=truncated),
        sampling=sampling_options(spec.sampling, model),
        stop=stop,
        output=_output(spec.output, model, is_chat=is_chat),
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        num_answers=num_answers,
        constraint=constraint,
        prompt_only=prompt_only,
        adapter=model.adapter,
        adapter_sha256=model.adapter_sha256,
        targets=targets,
    )


def named_model(name: str, model: ServedModel) -> ServedModel:
    """Returns the model that a request names: the one that is served, or one of its adapters.

    Raises:
        ModelNotFound: another model is served.
    """
    named = model.named(name)
    if named is None:
        others = [*map(repr, model.aliases), *(repr(adapter.name) for adapter in model.adapters)]
        served = " and ".join((repr(model.name), *others)) if len(others) < 10 else f"{model.name!r} and its adapters"
        raise ModelNotFound(f"model {name[:MAX_ID_CHARS]!r} is not served here; {served} {'are' if others else 'is'}")
    return named


def prompt(
    message: pb.GenerationSpec | pb.CountTokensRequest, model: ServedModel, path: str, *, truncated: bool = False
) -> Prompt:
    """Returns the checked prompt of a request, not yet tokenized.

    Args:
        path: path of `message` in the request, such as "spec.", for error messages.
        truncated: see `generation_request`.

    Raises:
        InvalidRequest: the prompt is missing, empty or too long.
    """
    match message.WhichOneof("prompt"):
        case "text":
            check_has_tokens(path + "text", model)
            text = message.text  # protobuf decodes it at each access
            if not text:
                raise InvalidRequest("the prompt is empty", field=path + "text")
            _check_num_chars(path + "text", len(text), model, truncated=truncated)
            return TextPrompt(text)
        case "chat":
            field = path + "chat.messages"
            check_has_tokens(field, model)
            json_texts = (*message.chat.tools_json, message.chat.template_variables_json)
            _check_num_chars(path + "chat.tools_json", sum(map(len, json_texts)), model)  # before they are parsed
            num_bytes = sum(len(text.encode()) for text in json_texts)
            check_at_most(path + "chat.tools_json", num_bytes, MAX_TOOLS_BYTES, "bytes with the template's variables")
            chat = chat_prompt(message.chat, path + "chat.")
            check_chat(chat, model, field, truncated=truncated)
            return chat
        case "token_ids" if isinstance(message, pb.GenerationSpec):
            field = path + "token_ids"
            tokens = at_once(token_prompt(message, model))
            if tokens is None:
                raise InvalidRequest("the prompt is empty", field=field)
            return tokens
    forms = "text or chat" if isinstance(message, pb.CountTokensRequest) else "text, token_ids or chat"
    raise InvalidRequest(f"there is no prompt: set exactly one of {forms}", field=path + "prompt")


def check_chat(chat: ChatPrompt, model: ServedModel, field: str, *, truncated: bool = False) -> None:
    """Checks a conversation before it is rendered.

    Args:
        field: the request's field that an error names.
        truncated: see `generation_request`.

    Raises:
        InvalidRequest: there are no messages, a message has no role, or there are too many.
    """
    if not chat.messages:
        raise InvalidRequest("the conversation has no messages, at least 1 is needed", field=field)
    check_at_most(field, len(chat.messages), model.max_model_len, "messages")
    _check_num_chars(field, chat.num_chars, model, truncated=truncated)
    if not all(turn.role for turn in chat.messages):
        raise InvalidRequest("a message has no role", field=field)


def num_output_tokens(stop: pb.StopOptions, model: ServedModel, default: int) -> int:
    """Returns the output tokens for which a truncated prompt leaves capacity: max_tokens or the default, or 1 if that
    exceeds the context.
    """
    asked = stop.max_tokens if stop.HasField("max_tokens") else default
    return max(asked, 1) if asked < model.max_model_len else 1


def with_token_budget(
    request: GenerationRequest, num_prompt_tokens: int, model: ServedModel, default: int
) -> GenerationRequest:
    """Sets max_tokens of a request with a tokenized prompt: its own value, or the default limited by the context.

    Raises:
        RequestTooLong: prompt and answer do not fit the model's context.
        InvalidRequest: min_tokens is more than can be generated.
    """
    capacity = model.max_model_len - num_prompt_tokens
    asked = request.stop.max_tokens
    if capacity < (asked or 1):
        raise RequestTooLong(
            f"This model's maximum context length is {model.max_model_len} tokens. The prompt has {num_prompt_tokens} "
            f"tokens and {asked or 1} output tokens are asked for, {num_prompt_tokens + (asked or 1)} in all: shorten "
            "the prompt or lower max_tokens",
            field="spec.prompt" if capacity < 1 else "spec.stop.max_tokens",
        )
    max_tokens = min(default, capacity) if asked is None else asked
    if request.stop.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.stop.min_tokens}, more than the {max_tokens} of max_tokens",
            field="spec.stop.min_tokens",
        )
    return replace(request, stop=replace(request.stop, max_tokens=max_tokens))


def _check_num_chars(field: str, num_chars: int, model: ServedModel, *, truncated: bool = False) -> None:
    most = MAX_CHARS_PER_TOKEN * model.max_model_len
    if truncated:
        most = max(most, MAX_TRUNCATED_CHARS)
    if num_chars > most:
        raise RequestTooLong(
            f"This model's maximum context length is {model.max_model_len} tokens. The prompt has {num_chars} "
            f"characters, at most {most} are tokenized",
            field=field,
        )


def _output(options: pb.OutputOptions, model: ServedModel, *, is_chat: bool) -> OutputOptions:
    if options.HasField("text") and options.text:
        check_has_tokens("spec.output.text", model)
    if options.parse and not is_chat:
        raise InvalidRequest("parse is for answers to a chat, and this prompt is no chat", field="spec.output.parse")
    if options.parse and options.HasField("text") and not options.text:
        raise InvalidRequest("parse takes the text apart, and text is false", field="spec.output.parse")
    if options.echo and not options.token_ids:
        check_has_tokens("spec.output.echo", model)
    most = min(MAX_TOP_LOGPROBS, model.max_logprobs)
    top_logprobs = options.top_logprobs if options.HasField("top_logprobs") else None
    prompt_logprobs = options.prompt_logprobs if options.HasField("prompt_logprobs") else None
    check_range("spec.output.top_logprobs", top_logprobs or 0, 0, most)
    check_range("spec.output.prompt_logprobs", prompt_logprobs or 0, 0, most)
    return OutputOptions(
        text=options.text if options.HasField("text") else model.tokenizer.has_tokens,
        token_ids=options.token_ids,
        top_logprobs=top_logprobs,
        keep_special_tokens=options.keep_special_tokens,
        prompt_logprobs=prompt_logprobs,
        echo=options.echo,
        parse=options.parse,
    )
