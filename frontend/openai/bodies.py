"""Bodies of the requests: which parameters there are, and their types. What values mean is checked behind the door, by
`frontend.request.convert`, for all doors alike.

A parameter that is not known here is refused by name, unless it is null or says what happens anyway: a client is told
that `suffix` has no effect, and a mistyped `temprature` does not go unseen.
"""

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from frontend.openai.error_object import BodyError
from frontend.openai.form_bodies import Choices, ResponseFormat, Schema, StructuredOutputs
from frontend.openai.nested import Nested

_IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""About billing, storing and tracing: taken, without effect."""

_NEUTRAL: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "best_of": 1,
    "detokenize": True,
    "function_call": "none",
    "length_penalty": 1.0,
    "modalities": ["text"],
    "spaces_between_special_tokens": True,
    "suffix": "",
    "use_beam_search": False,
}
"""Values of parameters we do not have that ask for what happens anyway."""

_UINT32_MAX = 2**32 - 1

TokenId = Annotated[int, Field(ge=0, le=_UINT32_MAX)]


def _array_as_it_is(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Ids of a large body come as an array, checked; see `sliced_json`."""
    return value if isinstance(value, array) else check(value)


TokenIds = Annotated[
    list[TokenId],
    Field(fail_fast=True),  # a complaint about each of 100,000 entries helps nobody
    WrapValidator(_array_as_it_is),
]
Texts = Annotated[list[str], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=_UINT32_MAX)]


def _bias_by_token(value: Any) -> Any:
    """JSON has no integer keys."""
    if isinstance(value, dict):
        try:
            return {int(key): bias for key, bias in value.items()}
        except ValueError:
            raise ValueError("the keys of logit_bias must be token ids") from None
    return value


class Body(BaseModel):
    """What all bodies have in common.

    Attributes:
        id_lists: parameters that are lists of token ids, or lists of such lists; long ones come as arrays.
        entry_kinds: what the entries of long lists are; of a large body they are checked one by one.
    """

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    id_lists: ClassVar[frozenset[str]] = frozenset({"prompt", "tokens", "allowed_token_ids"})
    entry_kinds: ClassVar[Mapping[str, type[BaseModel]]] = {}

    model: str = ""

    @model_validator(mode="after")
    def _refuse_unknown(self) -> "Body":
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _IGNORED or (name in _NEUTRAL and value == _NEUTRAL[name]):
                continue
            known = name in _NEUTRAL
            raise BodyError(
                400,
                f"{name[:64]!r} is not served here" if known else f"{name[:64]!r} is not a parameter of this server",
                param=name[:64],
                code="unsupported_parameter" if known else "unknown_parameter",
            )
        return self


class StreamOptions(Nested):
    """What a stream tells beside the text."""

    where = "stream_options"

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(Body):
    """Parameters of every kind of generation: OpenAI's, then those vLLM adds, and ours: `time_budget` and `timeout`."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[TokenId, float], BeforeValidator(_bias_by_token)] | None = None
    stream: bool | None = None

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    time_budget: float | None = None
    timeout: float | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None

    @property
    def stop_texts(self) -> list[str]:
        """Texts that end the answer."""
        return []


class GenerationBody(SamplingBody):
    """Parameters of completions and chat completions."""

    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=_UINT32_MAX)] | None = None
    stop: str | Texts | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    return_token_ids: bool | None = None
    prompt_logprobs: Count | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def stop_texts(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise BodyError(400, "stream_options is for streams: set stream to true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise BodyError(
                400,
                "prompt_logprobs is for answers that are not streamed",
                param="prompt_logprobs",
                code="unsupported_parameter",
            )
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Count | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds


_PROMPT_FORMS = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"


def body_error(error: ValidationError) -> BodyError:
    """What is wrong with a body, from pydantic's list: its first entry."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return BodyError(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    path = [str(part) for part in first["loc"]]
    if not path:
        return BodyError(400, "the body must be a JSON object")
    if path[0] == "prompt" and len(path) > 1:  # a union: pydantic complains once for each of its forms
        return BodyError(400, f"prompt {_PROMPT_FORMS}", param="prompt")
    if "content" in path:
        where = ".".join(path[: path.index("content") + 1])
        return BodyError(400, f"{where} must be a string or a list of parts of type text", param=path[0])
    return BodyError(400, f"{'.'.join(path)}: {first['msg']}", param=path[0])
