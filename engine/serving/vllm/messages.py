"""Outputs of answers to responses of vLLM's protocol."""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm_pb

from engine.core.outputs import TokenLogprobs
from engine.serving.vllm.answer import Answer, Unsent


def chunk_response(answer: Answer, unsent: Unsent, prompt_ids: Sequence[int]) -> Any:
    """Returns the response with the next tokens of an answer; its counts are those of these tokens."""
    return vllm_pb.GenerateResponse(
        chunk=vllm_pb.GenerateStreamChunk(
            token_ids=unsent.token_ids,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(unsent.token_ids),
            cached_tokens=answer.num_cached_tokens,
            output_logprobs=_output_logprobs(unsent),
            input_logprobs=_input_logprobs(unsent.prompt_logprobs, prompt_ids),
            index=answer.index,
        )
    )


def complete_response(answer: Answer, unsent: Unsent, prompt_ids: Sequence[int]) -> Any:
    """Returns the last response of an answer, with all its tokens.

    Args:
        answer: has ended.
        unsent: what no chunk had: with all its log-probabilities if nothing was streamed.
        prompt_ids: the prompt.
    """
    end = answer.end
    assert end is not None, "the answer has ended"
    complete = vllm_pb.GenerateComplete(
        output_ids=answer.token_ids,
        finish_reason=end.finish_reason,
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(answer.token_ids),
        cached_tokens=answer.num_cached_tokens,
        output_logprobs=_output_logprobs(unsent),
        input_logprobs=_input_logprobs(unsent.prompt_logprobs, prompt_ids),
        index=answer.index,
    )
    if end.matched_token_id is not None:
        complete.matched_token_id = end.matched_token_id
    if end.matched_text is not None:
        complete.matched_stop_str = end.matched_text
    return vllm_pb.GenerateResponse(complete=complete)


def _output_logprobs(unsent: Unsent) -> Any:
    if not unsent.logprobs:
        return None
    return vllm_pb.OutputLogProbs(
        token_logprobs=[token.chosen for token in unsent.logprobs],
        token_ids=unsent.token_ids,
        top_logprobs=[_top(token) for token in unsent.logprobs] if unsent.logprobs[0].top_ids else (),
    )


def _input_logprobs(logprobs: Sequence[TokenLogprobs], prompt_ids: Sequence[int]) -> Any:
    """Returns one entry per token of the prompt; the first has no value. None without log-probabilities."""
    if not logprobs:
        return None
    has_top = bool(logprobs[0].top_ids)
    return vllm_pb.InputLogProbs(
        token_logprobs=[
            vllm_pb.InputTokenLogProb(),
            *(vllm_pb.InputTokenLogProb(value=token.chosen) for token in logprobs),
        ],
        token_ids=prompt_ids,
        top_logprobs=[vllm_pb.TopLogProbs(), *map(_top, logprobs)] if has_top else (),
    )


def _top(token: TokenLogprobs) -> Any:
    return vllm_pb.TopLogProbs(values=token.top_values, token_ids=token.top_ids)
