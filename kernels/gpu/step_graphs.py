"""CUDA graphs of decode steps: a step of one token per row is recorded once per batch size and replayed as one launch.

A step of an 8B model is some 300 kernels. For a small batch, launching them one by one takes the host longer than the
GPU takes to run them. The batch builder pads batches between two recorded sizes to the larger one.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.gpu.progress import Progress, no_progress
from kernels.interface import Step
from kernels.metadata import StepInputs


class StepGraphs:
    """Replays the graph of the batch's size if there is one, and runs the step eagerly otherwise.

    All graphs share one memory pool, because only one runs at a time. Their logits are written to one buffer: a result
    that stays in use keeps its part of the pool, so separate results would add up over all sizes.
    """

    def __init__(self, step: Step, largest: StepInputs, sizes: Sequence[int], progress: Progress = no_progress) -> None:
        """Records the graphs.

        Args:
            step: only launches kernels on the current stream.
            largest: the whole persistent buffers, which hold a valid batch, and the buffer of the logits.
            sizes: batch sizes.
            progress: shows progress.
        """
        assert largest.logits is not None
        self._step = step
        self._logits = largest.logits
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        # the largest first: smaller ones fit into its memory
        for size in progress(sorted(sizes, reverse=True), desc="recording CUDA graphs", total=len(sizes)):
            # libraries choose and load their kernels for this size, which is not allowed in a capture
            step(decode_inputs(largest, size))
            torch.cuda.synchronize(self._logits.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                # with new metadata, so that what layers share is computed in the graph too
                logits = step(decode_inputs(largest, size))
            assert logits.data_ptr() == self._logits.data_ptr(), "the step does not write its logits to the buffer"
            self._graphs[size] = graph

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """Runs the step on views of the beginnings of the buffers -> logits [S, vocab_size], valid until the next."""
        logits = self._logits[: inputs.logits_indices.shape[0]]
        graph = self._graphs.get(inputs.metadata.num_reqs) if inputs.metadata.max_query_len == 1 else None
        if graph is None:
            return self._step(replace(inputs, logits=logits))
        graph.replay()
        return logits


def decode_inputs(largest: StepInputs, num_reqs: int) -> StepInputs:
    """Returns views of persistent buffers as a batch of `num_reqs` rows of one token, all of which sample."""
    metadata = largest.metadata
    return StepInputs(
        input_ids=largest.input_ids[:num_reqs],
        positions=largest.positions[:num_reqs],
        metadata=replace(
            metadata,
            query_start_loc=metadata.query_start_loc[: num_reqs + 1],
            seq_lens=metadata.seq_lens[:num_reqs],
            block_table=metadata.block_table[:num_reqs],
            slot_mapping=metadata.slot_mapping[:num_reqs],
            max_query_len=1,
            num_one_token_reqs=num_reqs,
        ),
        logits_indices=largest.logits_indices[:num_reqs],
        logits=None if largest.logits is None else largest.logits[:num_reqs],
    )
