"""The public protos to checked dataclasses. Whatever a client can get wrong in a field is found here, before any work
is done for it.

What depends on the prompt's length in tokens is checked after tokenizing, by `token_budget`.
"""

import secrets
import uuid

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest, ModelNotFound, RequestTooLong
from frontend.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_ANSWERS,
    MAX_ID_CHARS,
    MAX_LOGIT_BIASES,
    MAX_PROMPT_BYTES,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKEN_IDS,
    MAX_TIME_BUDGET_S,
    MAX_TOOLS_BYTES,
    MAX_TOP_LOGPROBS,
    MAX_TRUNCATED_CHARS,
    MIN_REPETITION_PENALTY,
)
from frontend.request.checks import check_at_most, check_range, check_token_ids
from frontend.request.convert_chat import chat_prompt
from frontend.request.convert_structured import bad_words, check_form_ends, output_form
from frontend.request.request import (
    ChatPrompt,
    GenerationRequest,
    OutputOptions,
    Prompt,
    SamplingOptions,
    StopOptions,
    TextPrompt,
)
from frontend.request.token_prompt import token_prompt
from frontend.slices import at_once
from frontend.text.served_model import ServedModel
from frontend.text.structured.output_format import OutputForm

DEFAULT_MAX_TOKENS = 256
MAX_CHARS_PER_TOKEN = 8
"""Prompts of more than this many characters per token of context are refused untokenized; ordinary text has four or
five.
"""


def generation_request(
    spec: pb.GenerationSpec,
    model: ServedModel,
    given: Prompt | None = None,
    form: OutputForm | None = None,
    *,
    truncated: bool = False,
) -> GenerationRequest:
    """Checks a request and fills in the defaults.

    Args:
        given: the prompt, if it has been checked already, or says more than the spec can.
        form: that of the answer, the same way.
        truncated: the prompt will be cut, so that it may be longer than what fits.

    Raises:
        InvalidRequest: names the field and the numbers.
        ModelNotFound: another model is served here.
    """
    check_model(spec.model, model)
    check_at_most("spec.request_id", len(spec.request_id), MAX_ID_CHARS, "characters")
    check_at_most("spec.cache_salt", len(spec.cache_salt), MAX_ID_CHARS, "characters")
    num_answers = spec.num_answers if spec.HasField("num_answers") else 1
    check_range("spec.num_answers", num_answers, 1, MAX_ANSWERS)
    if isinstance(given, ChatPrompt):
        check_chat(given, model, "spec.chat.messages", truncated=truncated)
    stop = _stop(spec.stop, model, may_be_empty=spec.output.echo or spec.output.HasField("prompt_logprobs"))
    form = form or output_form(spec)
    if form is not None:
        _check_has_tokens(form.field, model)
        check_form_ends(stop)
    is_chat = isinstance(given, ChatPrompt) or spec.WhichOneof("prompt") == "chat"
    return GenerationRequest(
        request_id=spec.request_id or uuid.uuid4().hex,
        prompt=given or prompt(spec, model, "spec.", truncated=truncated),
        sampling=_sampling(spec.sampling, model),
        stop=stop,
        output=_output(spec.output, model, is_chat=is_chat),
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        num_answers=num_answers,
        form=form,
    )


def check_model(name: str, model: ServedModel) -> None:
    """Checks that the request means the model that is served.

    Raises:
        ModelNotFound: it names another one.
    """
    if name not in ("", model.name):
        raise ModelNotFound(f"model {name[:MAX_ID_CHARS]!r} is not served here; {model.name!r} is")


def prompt(
    message: pb.GenerationSpec | pb.CountTokensRequest, model: ServedModel, path: str, *, truncated: bool = False
) -> Prompt:
    """The prompt of a request, not yet tokenized.

    Args:
        path: of `message` in the request, as in "spec.", for the errors.
        truncated: see `generation_request`.

    Raises:
        InvalidRequest: no prompt, an empty one, or one that cannot fit whatever its tokens are.
    """
    match message.WhichOneof("prompt"):
        case "text":
            _check_has_tokens(path + "text", model)
            text = message.text  # decoded anew whenever it is asked for
            if not text:
                raise InvalidRequest("the prompt is empty", field=path + "text")
            _check_num_chars(path + "text", len(text), model, truncated=truncated)
            check_at_most(path + "text", len(text.encode()), MAX_PROMPT_BYTES, "bytes of UTF-8")
            return TextPrompt(text)
        case "chat":
            field = path + "chat.messages"
            _check_has_tokens(field, model)
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
        InvalidRequest: no messages, a message without a role, or more of them than can fit.
    """
    if not chat.messages:
        raise InvalidRequest("the conversation has no messages, at least 1 is needed", field=field)
    check_at_most(field, len(chat.messages), model.max_model_len, "messages")
    _check_num_chars(field, chat.num_chars, model, truncated=truncated)
    if not all(turn.role for turn in chat.messages):
        raise InvalidRequest("a message has no role", field=field)


def num_output_tokens(stop: pb.StopOptions, model: ServedModel, default: int) -> int:
    """Room for the answer that a prompt leaves if it is cut to what fits: the length that is asked for, else the
    default, if that is not the whole context.
    """
    asked = stop.max_tokens if stop.HasField("max_tokens") else default
    return max(asked, 1) if asked < model.max_model_len else 1


def token_budget(
    request: GenerationRequest, num_prompt_tokens: int, model: ServedModel, default: int = DEFAULT_MAX_TOKENS
) -> int:
    """The effective max_tokens of a request whose prompt has been tokenized: what it asks for, else the default as
    far as it fits.

    Raises:
        RequestTooLong: prompt and answer do not fit the model's context.
        InvalidRequest: min_tokens is more than can be generated.
    """
    room = model.max_model_len - num_prompt_tokens
    asked = request.stop.max_tokens
    if room < (asked or 1):  # the engine computes one token even if none is asked for
        raise RequestTooLong(
            f"This model's maximum context length is {model.max_model_len} tokens. The prompt has {num_prompt_tokens} "
            f"tokens and {asked or 1} output tokens are asked for, {num_prompt_tokens + (asked or 1)} in all: shorten "
            "the prompt or lower max_tokens",
            field="spec.prompt" if room < 1 else "spec.stop.max_tokens",
        )
    max_tokens = min(default, room) if asked is None else asked
    if request.stop.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.stop.min_tokens}, more than the {max_tokens} of max_tokens",
            field="spec.stop.min_tokens",
        )
    return max_tokens


def _check_has_tokens(field: str, model: ServedModel) -> None:
    if not model.tokenizer.has_tokens:
        raise InvalidRequest("the model has no tokenizer: send token_ids, and take token_ids", field=field)


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


def _sampling(options: pb.SamplingOptions, model: ServedModel) -> SamplingOptions:
    defaults, path = model.defaults, "spec.sampling."
    temperature = options.temperature if options.HasField("temperature") else defaults.temperature
    top_p = options.top_p if options.HasField("top_p") else defaults.top_p
    repetition_penalty = options.repetition_penalty if options.HasField("repetition_penalty") else 1.0
    check_range(path + "temperature", temperature, 0.0, 100.0)
    check_range(path + "top_p", top_p, 0.0, 1.0, above_low=True)
    check_range(path + "min_p", options.min_p, 0.0, 1.0)
    check_range(path + "repetition_penalty", repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    check_range(path + "presence_penalty", options.presence_penalty, -2.0, 2.0)
    check_range(path + "frequency_penalty", options.frequency_penalty, -2.0, 2.0)
    check_at_most(path + "logit_bias", len(options.logit_bias), MAX_LOGIT_BIASES, "entries")
    check_token_ids(path + "logit_bias", list(options.logit_bias), model.vocab_size)
    for bias in options.logit_bias.values():
        check_range(path + "logit_bias", bias, -100.0, 100.0)
    check_at_most(path + "allowed_token_ids", len(options.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS, "entries")
    check_token_ids(path + "allowed_token_ids", options.allowed_token_ids, model.vocab_size)
    if options.bad_words:
        _check_has_tokens(path + "bad_words", model)
    return SamplingOptions(
        temperature=temperature,
        top_p=top_p,
        top_k=options.top_k if options.HasField("top_k") else defaults.top_k,
        min_p=options.min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        logit_bias=tuple(sorted(options.logit_bias.items())),
        allowed_token_ids=tuple(sorted(set(options.allowed_token_ids))),
        bad_words=bad_words(options, path),
    )


def _stop(options: pb.StopOptions, model: ServedModel, *, may_be_empty: bool) -> StopOptions:
    path = "spec.stop."
    max_tokens = options.max_tokens if options.HasField("max_tokens") else None
    if max_tokens is not None:
        if max_tokens < 1 and not may_be_empty:
            raise InvalidRequest(
                "max_tokens is 0, it must be at least 1 without echo or prompt_logprobs", field=path + "max_tokens"
            )
        if max_tokens >= model.max_model_len:
            raise RequestTooLong(
                f"This model's maximum context length is {model.max_model_len} tokens, of which at least 1 is prompt; "
                f"max_tokens is {max_tokens}",
                field=path + "max_tokens",
            )
    if options.stop_texts:
        _check_has_tokens(path + "stop_texts", model)
    check_range(path + "min_tokens", options.min_tokens, 0, model.max_model_len if max_tokens is None else max_tokens)
    check_at_most(path + "stop_texts", len(options.stop_texts), MAX_STOP_TEXTS, "entries")
    for text in options.stop_texts:
        if not text:
            raise InvalidRequest("a stop text is empty", field=path + "stop_texts")
        check_at_most(path + "stop_texts", len(text.encode()), MAX_STOP_TEXT_BYTES, "bytes in one entry")
    check_at_most(path + "stop_token_ids", len(options.stop_token_ids), MAX_STOP_TOKEN_IDS, "entries")
    check_token_ids(path + "stop_token_ids", options.stop_token_ids, model.vocab_size)
    return StopOptions(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        stop_texts=tuple(options.stop_texts),
        stop_token_ids=tuple(options.stop_token_ids),
        include_stop_text=options.include_stop_text,
        ignore_end_token=options.ignore_end_token,
        time_budget_s=_time_budget_s(options, path + "time_budget"),
    )


def _time_budget_s(options: pb.StopOptions, field: str) -> float | None:
    if not options.HasField("time_budget"):
        return None
    seconds, nanos = options.time_budget.seconds, options.time_budget.nanos
    if not -(10**9) < nanos < 10**9 or seconds * nanos < 0:
        raise InvalidRequest(
            f"time_budget has {seconds} seconds and {nanos} nanos: the nanos of a Duration are less than a second, and "
            "of the same sign",
            field=field,
        )
    budget_s = seconds + nanos / 1e9
    check_range(field, budget_s, 0.0, MAX_TIME_BUDGET_S, above_low=True, unit=" s")
    return budget_s


def _output(options: pb.OutputOptions, model: ServedModel, *, is_chat: bool) -> OutputOptions:
    if options.HasField("text") and options.text:
        _check_has_tokens("spec.output.text", model)
    if options.parse and not is_chat:
        raise InvalidRequest("parse is for answers to a chat, and this prompt is no chat", field="spec.output.parse")
    if options.parse and options.HasField("text") and not options.text:
        raise InvalidRequest("parse takes the text apart, and text is false", field="spec.output.parse")
    if options.echo and not options.token_ids:
        _check_has_tokens("spec.output.echo", model)
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
