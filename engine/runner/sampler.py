"""From logits to the token, log-probabilities and failures of each row that samples."""

from typing import NamedTuple

import torch

from engine.core.outputs import TokenLogprobs
from engine.runner.request_state import Int64Array, RequestState
from kernels.ops import KernelOps
from kernels.sampling import RowStatus, SampledTokens, SamplingBatch

_FAILURES = {
    RowStatus.BAD_LOGITS: "the model's logits hold NaN or infinity",
    RowStatus.NO_CANDIDATE: "logit_bias and min_tokens leave no token to choose from",
}


class SamplerOutput(NamedTuple):
    """What S rows became.

    Attributes:
        token_ids: [S], -1 where a row failed.
        logprobs, failures: by index into the S rows.
    """

    token_ids: Int64Array
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]


def sample_rows(ops: KernelOps, logits: torch.Tensor, state: RequestState, rows: Int64Array) -> SamplerOutput:
    """Draws the next token of each row.

    Args:
        ops: whose sampler to use.
        logits: [S, vocab_size] float32.
        state: parameters and tokens so far.
        rows: [S], rows of `state`.
    """
    batch = state.sampling.gather(
        rows,
        token_ids=state.token_ids,
        num_tokens=state.num_tokens[rows],
        num_prompt_tokens=state.num_prompt_tokens[rows],
    )
    sampled = ops.sample(logits, batch)
    status = sampled.status.numpy()
    failures = {int(i): _FAILURES[RowStatus(status[i])] for i in status.nonzero()[0]}
    logprobs = _token_logprobs(sampled, batch) if batch.max_top_logprobs >= 0 else {}
    return SamplerOutput(sampled.token_ids.numpy(), logprobs, failures)


def _token_logprobs(sampled: SampledTokens, batch: SamplingBatch) -> dict[int, TokenLogprobs]:
    logprobs = {}
    chosen, top_ids, top_values = sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_values.tolist()
    for i, (num_top, status) in enumerate(zip(batch.top_logprobs.tolist(), sampled.status.tolist(), strict=True)):
        if num_top >= 0 and status == RowStatus.OK:
            ids = tuple(token_id for token_id in top_ids[i][:num_top] if token_id >= 0)
            logprobs[i] = TokenLogprobs(chosen[i], ids, tuple(top_values[i][: len(ids)]))
    return logprobs
