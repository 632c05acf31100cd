"""Converts the bodies of completions and chat completions to GenerationSpecs."""

from collections.abc import Sequence
from typing import cast

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.errors import BodyError
from frontend.api.http.generation_spec import sampling_spec
from frontend.api.openai.chat_bodies import ChatBody
from frontend.api.openai.completion_bodies import CompletionBody, GenerationBody
from frontend.limits import MAX_PROMPTS
from frontend.slices import Sliced, pieces

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's and vLLM's default max_tokens of completions."""


def completion_specs(body: CompletionBody, request_id: str) -> Sliced[list[pb.GenerationSpec]]:
    """Returns one GenerationSpec per prompt.

    Raises:
        BodyError: too many prompts, or parameters that exclude each other.
    """
    scored = body.logprobs if body.echo else None  # the echo includes the prompt's log-probabilities
    if None not in (scored, body.prompt_logprobs) and scored != body.prompt_logprobs:
        raise BodyError(
            400,
            f"prompt_logprobs is {body.prompt_logprobs} and logprobs with echo is {scored}: one prompt has one width",
            param="prompt_logprobs",
        )
    prompts = _prompts(body)
    if len(prompts) > MAX_PROMPTS:
        raise BodyError(400, f"prompt has {len(prompts)} entries, at most {MAX_PROMPTS} are allowed", param="prompt")
    specs = []
    for index, prompt in enumerate(prompts):
        spec = _spec(body, request_id if len(prompts) == 1 else f"{request_id}-{index}")
        if isinstance(prompt, str):
            spec.text = prompt
        else:
            for piece in pieces(prompt):
                spec.token_ids.ids.extend(piece)
                yield
            spec.token_ids.SetInParent()  # an empty list is an empty prompt, not a missing one
        if body.echo:
            spec.output.echo = True
        if scored is not None:
            _ask_for_prompt_logprobs(spec.output, scored)
        if body.max_tokens is not None:
            spec.stop.max_tokens = body.max_tokens
        if body.logprobs is not None:
            spec.output.top_logprobs = body.logprobs
        specs.append(spec)
        yield
    return specs


def chat_spec(body: ChatBody, request_id: str) -> pb.GenerationSpec:
    """Returns the GenerationSpec of a chat completion, without the conversation."""
    spec = _spec(body, request_id)
    spec.output.parse = True
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and not body.is_unlimited:
        spec.stop.max_tokens = max_tokens
    if body.logprobs:
        spec.output.top_logprobs = body.top_logprobs or 0
    return spec


def _prompts(body: CompletionBody) -> Sequence[str | Sequence[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or isinstance(prompt[0], int):  # all are, or none is
        return [cast("Sequence[int]", prompt)]
    return cast("list[str | list[int]]", prompt)


def _spec(body: GenerationBody, request_id: str) -> pb.GenerationSpec:
    spec = sampling_spec(body, request_id)
    if body.n is not None:
        spec.num_answers = body.n
    if body.return_token_ids:
        spec.output.token_ids = spec.output.echo = True
    if body.return_tokens_as_token_ids:
        spec.output.token_ids = True  # log-probabilities name tokens by id
    if body.prompt_logprobs is not None:
        _ask_for_prompt_logprobs(spec.output, body.prompt_logprobs)
    return spec


def _ask_for_prompt_logprobs(output: pb.OutputOptions, width: int) -> None:
    output.prompt_logprobs = width
    output.token_ids = True  # the prompt's ids say which tokens the log-probabilities belong to
