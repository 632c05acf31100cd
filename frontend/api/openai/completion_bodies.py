"""Bodies of /v1/completions and /detokenize, and the parameters that completions and chat completions share."""

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from chairlift.service.structured.output_constraint import ConstraintKind, OutputConstraint
from frontend.api.http.bodies import (
    UINT32_MAX,
    Body,
    Count,
    NoneIfEmpty,
    ParameterObject,
    PositiveCount,
    StrictTokenIds,
    Texts,
    TokenIds,
)
from frontend.api.http.errors import BodyError
from frontend.api.http.output_constraint import schema_constraint
from frontend.api.openai.sampling_body import OpenAISamplingBody
from frontend.api.openai.structured_outputs import Choices, ResponseFormat, Schema, StructuredOutputs
from frontend.request.convert_structured import choice_constraint, text_constraint
from frontend.request.prompt_options import WHAT_FITS, PromptOptions


class StreamOptions(ParameterObject):
    """Options of streams."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    @property
    def is_set(self) -> bool:
        """Whether any option is on."""
        return bool(self.include_usage or self.continuous_usage_stats or self.include_obfuscation)


class GenerationBody(OpenAISamplingBody):
    """Parameters of completions and chat completions."""

    max_tokens: Count | None = None
    n: PositiveCount | None = None
    best_of: Annotated[Count | None, NoneIfEmpty] = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[ResponseFormat | None, NoneIfEmpty] = None

    return_token_ids: bool | None = None
    prompt_logprobs: Count | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=WHAT_FITS, le=UINT32_MAX)] | None = None
    truncation_side: Annotated[Literal["left", "right"] | None, NoneIfEmpty] = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: Annotated[StructuredOutputs | None, NoneIfEmpty] = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    # Names of llama.cpp.
    n_predict: Annotated[int, Field(ge=-(2**31), le=UINT32_MAX)] | None = None
    n_probs: Count | None = None
    repeat_penalty: float | None = None
    cache_prompt: bool | None = None
    grammar: Annotated[str | None, NoneIfEmpty] = None
    json_schema: Annotated[Schema | None, BeforeValidator(lambda schema: None if schema == "" else schema)] = None

    @property
    def prompt_options(self) -> PromptOptions:
        """Options of tokenization. As in vLLM, truncation keeps the last tokens unless truncation_side is right."""
        return PromptOptions(
            self.add_special_tokens, self.truncate_prompt_tokens, keep_first=self.truncation_side == "right"
        )

    def output_constraint(self) -> OutputConstraint | None:
        """Returns the constraint on the answer; None: free text.

        Raises:
            BodyError: formats that differ, or an incomplete one.
            InvalidRequest: an empty format, or one that is too large.
        """
        # guidance sends one grammar under vLLM's old and new name.
        constraints = list({(each.kind, each.text): each for each in self._constraints()}.values())
        if len(constraints) > 1:
            names = " and ".join(constraint.field for constraint in constraints)
            raise BodyError(400, f"{names} do not go together: set one of them", param=constraints[1].field)
        return constraints[0] if constraints else None

    def _constraints(self) -> Iterator[OutputConstraint]:
        if self.response_format is not None:
            yield from self.response_format.constraints()
        if self.structured_outputs is not None:
            yield self.structured_outputs.constraint()
        if self.guided_json is not None:
            yield schema_constraint(self.guided_json, "guided_json")
        if self.guided_regex is not None:
            yield text_constraint(ConstraintKind.REGEX, self.guided_regex, "guided_regex")
        if self.guided_choice is not None:
            yield choice_constraint(self.guided_choice, "guided_choice")
        if self.guided_grammar is not None:
            yield text_constraint(ConstraintKind.GRAMMAR, self.guided_grammar, "guided_grammar")
        if self.grammar is not None:
            yield text_constraint(ConstraintKind.GRAMMAR, self.grammar, "grammar")
        if self.json_schema is not None:
            yield schema_constraint(self.json_schema, "json_schema")

    @property
    def is_unlimited(self) -> bool:
        """Whether llama.cpp's n_predict allows an answer up to the context length."""
        return self.n_predict is not None and self.n_predict < 0

    @model_validator(mode="after")
    def _take_other_names(self) -> "GenerationBody":
        shared: Any = self  # mypy does not see fields that are made from the table
        if shared.repetition_penalty is None:
            shared.repetition_penalty = self.repeat_penalty
        if self.n_predict is not None:  # wins, as in llama.cpp
            self.max_tokens = None if self.is_unlimited else self.n_predict
        if self.cache_prompt is False and not self.cache_salt:
            self.cache_salt = uuid.uuid4().hex  # unique: shares no prefix with other prompts
        return self

    @model_validator(mode="after")
    def _refuse_a_selection(self) -> "GenerationBody":
        if self.best_of and self.best_of not in (1, self.n):
            text = "best_of is not served here above n: all answers that are generated are returned"
            raise BodyError(400, text, param="best_of", code="unsupported_parameter")
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and self.stream_options.is_set and not self.stream:
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

    prompt: str | StrictTokenIds | Texts | Annotated[list[StrictTokenIds], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[Count | None, BeforeValidator(lambda width: None if width is False else width)] = None

    max_completion_tokens: Count | None = None  # chat completions' name of max_tokens; guidellm sends both

    @model_validator(mode="after")
    def _take_names_of_chats(self) -> "CompletionBody":
        if self.logprobs is None and self.n_probs:
            self.logprobs = self.n_probs
        if self.max_tokens is None and not self.is_unlimited:
            self.max_tokens = self.max_completion_tokens
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds
