"""Copies sampling results to the host: token, logprobs and failure of each row."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from engine.core.outputs import TokenLogprobs
from engine.runner.sampling_state import Int32Array, Int64Array
from engine.runner.stream import Stream
from kernels.sampling import RowStatus, SampledTokens

_FAILURES = {
    RowStatus.BAD_LOGITS: "the model's logits hold NaN or infinity",
    RowStatus.NO_CANDIDATE: "logit_bias, min_tokens, allowed tokens, bad words and grammar exclude every token",
}


class SamplerOutput(NamedTuple):
    """Results of S rows.

    Attributes:
        token_ids: [S], -1 where a row failed.
        logprobs, failures: by index into the S rows.
    """

    token_ids: Int64Array
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]


class SampledBuffer:
    """Host memory for the results of one step, reused when they have been read."""

    def __init__(self, stream: Stream, max_num_seqs: int, max_logprobs: int) -> None:
        """Allocates memory for the most alternatives per row: allocating pinned memory during a step would stall it."""
        self._stream = stream
        self.token_ids = stream.host_buffer(8 * max_num_seqs).view(torch.int64)
        self.status = stream.host_buffer(max_num_seqs).view(torch.int8)
        self.logprobs = stream.host_buffer(8 * max_num_seqs).view(torch.float64)
        self.top_ids = stream.host_buffer(8 * max_num_seqs * max_logprobs).view(torch.int64)
        self.top_values = stream.host_buffer(8 * max_num_seqs * max_logprobs).view(torch.float64)

    def receive(self, sampled: SampledTokens, max_top_logprobs: int) -> None:
        """Device work: copies the results; logprobs only if requested (max_top_logprobs >= 0).

        Tensors in host memory are kept without a copy: the sampler allocates new ones for every step.
        """
        if self._stream.is_inline:
            self.token_ids, self.status, self.logprobs = sampled.token_ids, sampled.status, sampled.logprobs
            if max_top_logprobs > 0:
                self.top_ids, self.top_values = sampled.top_ids.flatten(), sampled.top_values.flatten()
            return
        for source, target in self._copies(sampled, max_top_logprobs):
            target[: source.numel()].view(source.shape).copy_(source, non_blocking=True)

    def read(self, top_logprobs: Int32Array, max_top_logprobs: int) -> SamplerOutput:
        """Reads the results.

        Args:
            top_logprobs: [S], number of alternatives per row; -1: no logprobs.
            max_top_logprobs: the largest of them.
        """
        num_rows = len(top_logprobs)
        status = self.status.numpy()[:num_rows]
        failures = {int(i): _FAILURES[RowStatus(status[i])] for i in status.nonzero()[0]}
        logprobs = self._logprobs(top_logprobs, max_top_logprobs) if max_top_logprobs >= 0 else {}
        return SamplerOutput(self.token_ids.numpy()[:num_rows], logprobs, failures)

    def _copies(self, sampled: SampledTokens, max_top_logprobs: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield sampled.token_ids, self.token_ids
        yield sampled.status, self.status
        if max_top_logprobs >= 0:
            yield sampled.logprobs, self.logprobs
        if max_top_logprobs > 0:
            yield sampled.top_ids, self.top_ids
            yield sampled.top_values, self.top_values

    def _logprobs(self, top_logprobs: Int32Array, max_top_logprobs: int) -> dict[int, TokenLogprobs]:
        num_rows = len(top_logprobs)
        shape = num_rows, max_top_logprobs
        num_values = num_rows * max_top_logprobs
        chosen = self.logprobs[:num_rows].tolist()
        top_ids = self.top_ids[:num_values].view(shape).tolist()
        top_values = self.top_values[:num_values].view(shape).tolist()
        logprobs = {}
        for i, (num_top, status) in enumerate(zip(top_logprobs.tolist(), self.status[:num_rows].tolist(), strict=True)):
            if num_top >= 0 and status == RowStatus.OK:
                ids = tuple(token_id for token_id in top_ids[i][:num_top] if token_id >= 0)
                logprobs[i] = TokenLogprobs(chosen[i], ids, tuple(top_values[i][: len(ids)]))
        return logprobs
