"""CUDA graphs of steps: recorded once per size and replayed with few launches.

A step of an 8B model is some 300 kernels. For a small batch, launching them one by one takes the host longer than the
GPU takes to run them. Steps of one token per row are one graph for each number of rows. Steps with prompt chunks are
recorded for some numbers of tokens, without their attention (`kernels.gpu.step_pieces`). The batch builder pads a step
between two recorded sizes to the larger one.

If requests may have adapters, each size is recorded twice: without adapters, and with those that the batch then names,
so that steps without adapted tokens launch nothing more.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch

from kernels.gpu.capture import CaptureError, capture
from kernels.gpu.progress import Progress, no_progress
from kernels.gpu.step_pieces import PieceRecorder, StepPieces
from kernels.interface import Step
from kernels.metadata import AdaptedTokens, StepInputs


class UnrecordedSize(NamedTuple):
    """A size whose capture failed.

    Attributes:
        size: rows of a decode step, tokens of another one.
        error: one line.
    """

    size: int
    is_decode: bool
    error: str


class _Form(NamedTuple):
    """Which recorded step a batch takes."""

    size: int
    is_adapted: bool


class StepGraphs:
    """Replays the graphs of the step's size if there are any, and runs the step eagerly otherwise.

    All graphs share one memory pool, because only one step runs at a time. Their logits are written to one buffer: a
    result that stays in use keeps its part of the pool, so separate results would add up over all sizes.

    Each size is recorded whether or not others could be, out of memory included: the ranks of a model run the same
    steps before their captures, and a smaller graph may fit.

    Attributes:
        unrecorded: sizes that run eagerly because their capture failed; they keep their padding.
    """

    def __init__(
        self,
        step: Step,
        largest: StepInputs,
        decode_sizes: Sequence[int],
        mixed_sizes: Sequence[int],
        recording: Callable[[PieceRecorder], AbstractContextManager[None]],
        progress: Progress = no_progress,
    ) -> None:
        """Records the graphs.

        Args:
            step: only launches kernels on the current stream.
            largest: the whole persistent buffers, which hold a valid batch, and the buffer of the logits.
            decode_sizes: numbers of rows of steps of one token per row.
            mixed_sizes: numbers of tokens of steps with longer rows.
            recording: lets the step call the operations of a recorder inside its context.
            progress: shows progress.
        Raises: RuntimeError: a step fails without a capture, or the device failed.
        """
        assert largest.logits is not None
        self._step = step
        self._logits = largest.logits
        self._pool = torch.cuda.graph_pool_handle()
        self._decode: dict[_Form, torch.cuda.CUDAGraph] = {}
        self._mixed: dict[_Form, StepPieces] = {}
        self._device = self._logits.device
        self.unrecorded: list[UnrecordedSize] = []
        recorder = PieceRecorder(self._pool, self._device)
        kinds = (False,) if largest.adapted is None else (True, False)
        forms = [(_Form(size, kind), False) for size in sorted(mixed_sizes, reverse=True) for kind in kinds]
        forms += [(_Form(size, kind), True) for size in sorted(decode_sizes, reverse=True) for kind in kinds]
        # the largest first: smaller ones fit into its memory
        for form, is_decode in progress(forms, desc="recording CUDA graphs", total=len(forms)):
            try:
                if is_decode:
                    self._decode[form] = self._record(largest, form)
                else:
                    with recording(recorder):
                        self._mixed[form] = recorder.record(step, mixed_inputs(largest, *form))
            except CaptureError as error:
                if (failed := UnrecordedSize(form.size, is_decode, str(error))) not in self.unrecorded:
                    self.unrecorded.append(failed)

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """Runs the step on views of the beginnings of the buffers -> logits [S, vocab_size], valid until the next."""
        logits = self._logits[: inputs.logits_indices.shape[0]]
        is_adapted = inputs.adapted is not None and inputs.adapted.indices.shape[0] > 0
        if inputs.metadata.max_query_len == 1:
            if (graph := self._decode.get(_Form(inputs.metadata.num_reqs, is_adapted))) is not None:
                graph.replay()
                return logits
        elif (pieces := self._mixed.get(_Form(inputs.input_ids.shape[0], is_adapted))) is not None:
            pieces.replay(inputs.metadata)
            return logits
        return self._step(replace(inputs, logits=logits))

    def _record(self, largest: StepInputs, form: _Form) -> torch.cuda.CUDAGraph:
        # libraries choose and load their kernels for this size, which is not allowed in a capture
        logits = self._step(decode_inputs(largest, *form))
        assert logits.data_ptr() == self._logits.data_ptr(), "the step does not write its logits to the buffer"
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capture(graph, self._pool, self._device):
            # with new metadata, so that what layers share is computed in the graph too
            self._step(decode_inputs(largest, *form))
        return graph


def decode_inputs(largest: StepInputs, num_reqs: int, is_adapted: bool = False) -> StepInputs:
    """Returns views of persistent buffers as a batch of `num_reqs` rows of one token, all of which sample.

    is_adapted: whether tokens may have adapters.
    """
    return StepInputs(
        input_ids=largest.input_ids[:num_reqs],
        positions=largest.positions[:num_reqs],
        metadata=largest.metadata.one_token_rows(num_reqs, num_reqs),
        logits_indices=largest.logits_indices[:num_reqs],
        logits=None if largest.logits is None else largest.logits[:num_reqs],
        adapted=_adapted(largest, num_reqs) if is_adapted else None,
        residual=None if largest.residual is None else largest.residual[:num_reqs],
    )


def _adapted(largest: StepInputs, num_tokens: int) -> AdaptedTokens:
    assert largest.adapted is not None
    return AdaptedTokens(largest.adapted.indices[:num_tokens], largest.adapted.adapters[:num_tokens])


def mixed_inputs(largest: StepInputs, num_tokens: int, is_adapted: bool = False) -> StepInputs:
    """Returns views of persistent buffers as `num_tokens` tokens, of which as many as possible are rows that sample.

    is_adapted: whether tokens may have adapters.
    """
    num_reqs = min(num_tokens, largest.metadata.num_reqs)
    inputs = decode_inputs(largest, num_reqs)
    return replace(
        inputs,
        input_ids=largest.input_ids[:num_tokens],
        positions=largest.positions[:num_tokens],
        metadata=largest.metadata.one_token_rows(num_reqs, num_tokens),
        adapted=_adapted(largest, num_tokens) if is_adapted else None,
    )
