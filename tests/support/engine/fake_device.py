"""Fake model on a device: `fake_model.py`'s oracle on tensors, which detects every mistake of the runner.

The cache of `ChainDecoder` stores in each slot a token and H(what the slot before it stores, token, position). A row
walks the block table *on the device* from position 0, requires every slot to continue the chain, writes its own slots,
and hands the last chain to the sampler of `ChainOps`, which draws `FakeModel`'s token from it. So an answer equals
`FakeModel.solo_output` only if every id, position, slot, block and row was right in every step. What the sampler is
told of a row is compared with what its request asked for. On a `LateStream` all of this happens late.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from engine.constraints.constraint import Constraint
from engine.constraints.token_bits import Words, num_words
from engine.core.outputs import SchedulerOutput, TokenLogprobs
from engine.core.request import Request, SamplingParams
from engine.runner.model_runner import StepInFlight, TorchModelRunner
from kernels.gpu.step_graphs import decode_inputs, mixed_inputs
from kernels.interface import KVCache, Step
from kernels.metadata import StateCopy, StepInputs
from kernels.reference.ops import ReferenceOps
from kernels.sampling import RowStatus, SampledTokens, SamplingBatch
from tests.support.engine.fake_model import FakeModel, OracleViolation
from tests.support.engine.stream import POISON


class ShadowCache:
    """What each slot of a paged cache holds: [num_blocks * block_size] each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.chains = [0] * (num_blocks * block_size)
        self.token_ids = [POISON] * (num_blocks * block_size)


class ChainDecoder:
    """`engine.runner.model_runner.StepModel`; its "logits" are the last chain of each row and its number of tokens.

    Attributes:
        num_padding_rows, num_padding_tokens, num_steps: seen so far.
    """

    dtype = torch.float32
    mixes_torch = False
    resumes_states = False

    def __init__(self, model: FakeModel, sizes: Sequence[int] = (), mixed_sizes: Sequence[int] = ()) -> None:
        self.num_padding_rows = 0
        self.num_padding_tokens = 0
        self.num_steps = 0
        self._model = model
        self._sizes = sizes
        self._mixed_sizes = mixed_sizes

    def allocate_states(self, _num_slots: int) -> None:
        """Does nothing: keys and values are all that it keeps."""

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Raises: OracleViolation: there are some."""
        if copies:
            raise OracleViolation(f"states are copied: {copies}")

    def step(self, inputs: StepInputs, kv_caches: Sequence[KVCache]) -> torch.Tensor:
        """One step -> [S, 2] int64.

        Raises: OracleViolation: the tensors contradict each other, or a row attends to what is not its own.
        """
        (cache,) = kv_caches
        metadata = inputs.metadata
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        token_ids, positions = inputs.input_ids.tolist(), inputs.positions.tolist()
        slots = metadata.slot_mapping.tolist()
        if not (len(starts) == len(seq_lens) + 1 and starts[0] == 0):
            raise OracleViolation(f"{len(seq_lens)} rows begin at {starts}")
        if not starts[-1] <= len(token_ids) == len(positions) == len(slots):
            raise OracleViolation(f"{starts[-1]} tokens in {len(token_ids)} ids, {len(positions)} positions")
        padding = set(zip(token_ids[starts[-1] :], positions[starts[-1] :], slots[starts[-1] :], strict=True))
        if padding and (padding != {(0, 0, -1)} or len(token_ids) not in self._mixed_sizes):
            raise OracleViolation(f"tokens behind {starts[-1]} of {len(token_ids)} are padding, and have {padding}")
        self.num_padding_tokens += len(token_ids) - starts[-1]
        query_lens = [stop - start for start, stop in itertools.pairwise(starts)]
        num_narrow = next((i for i, length in enumerate(query_lens) if length != 1), len(query_lens))
        if metadata.num_one_token_reqs != num_narrow or metadata.max_query_len != max(query_lens):
            raise OracleViolation(f"{metadata.num_one_token_reqs} rows of one token, lengths are {query_lens}")
        if max(seq_lens) > metadata.max_seq_len:
            raise OracleViolation(f"sequences of {seq_lens} tokens, the host says {metadata.max_seq_len} at most")
        self.num_steps += 1
        ends: list[tuple[int, int]] = []  # per token: the chain it ends, and how many tokens that are
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            tokens = list(zip(token_ids[start:stop], positions[start:stop], slots[start:stop], strict=True))
            if seq_lens[row] == 0:
                self.num_padding_rows += 1
                if tokens != [(0, 0, -1)] or len(seq_lens) not in self._sizes:
                    raise OracleViolation(f"row {row} of {len(seq_lens)} is padding, and has {tokens}")
                ends.append((POISON, POISON))
                continue
            table = metadata.block_table[row].tolist()
            ends += self._run_row(row, seq_lens[row], tokens, table, cache, metadata.block_size)
        wanted = inputs.logits_indices.tolist()
        if not all(0 <= index < len(ends) for index in wanted):
            raise OracleViolation(f"logits of tokens {wanted} of {len(ends)}")
        return torch.tensor([ends[index] for index in wanted], dtype=torch.int64).view(-1, 2)

    def _run_row(
        self,
        row: int,
        seq_len: int,
        tokens: list[tuple[int, int, int]],
        table: list[int],
        cache: ShadowCache,
        block_size: int,
    ) -> list[tuple[int, int]]:
        chain = self._model.root(b"")
        num_computed = seq_len - len(tokens)
        for position in range(num_computed):
            slot = table[position // block_size] * block_size + position % block_size
            chain = self._model.extend(chain, cache.token_ids[slot], position)
            if cache.chains[slot] != chain:
                raise OracleViolation(f"row {row} attends to position {position}, slot {slot}: not its own token there")
        ends = []
        for expected, (token_id, position, slot) in enumerate(tokens, num_computed):
            if position != expected:
                raise OracleViolation(f"row {row} has position {position} where {expected} is due")
            if slot != table[position // block_size] * block_size + position % block_size:
                raise OracleViolation(f"row {row} writes position {position} to slot {slot}, its table is {table}")
            if not 0 <= token_id < self._model.vocab_size:
                raise OracleViolation(f"row {row} reads token {token_id} at position {position}")
            chain = self._model.extend(chain, token_id, position)
            cache.chains[slot], cache.token_ids[slot] = chain, token_id
            ends.append((chain, position + 1))
        return ends


class ChainMatcher:
    """`engine.constraints.constraint.Matcher` whose set of tokens is the chain that the model's last token ends."""

    error = ""

    def __init__(self, model: FakeModel, prompt_ids: Sequence[int]) -> None:
        self._model = model
        self._chain = model.root(b"")
        self._num_tokens = 0
        self.accept(prompt_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Extends the chain."""
        for token_id in token_ids:
            self._chain = self._model.extend(self._chain, token_id, self._num_tokens)
            self._num_tokens += 1

    def fill(self, words: Words) -> None:
        """Writes its lowest bits."""
        words[:] = chain_word(self._chain)


def chain_word(chain: int) -> int:
    """The lowest bits of a chain as a word of a mask."""
    return (chain & 0x7FFFFFFF) | 1


class ChainOps(ReferenceOps):
    """Operations for `ChainDecoder`: its cache, decode steps "recorded" for some sizes, and a suspicious sampler.

    Args:
        model: draws.
        requests: what each asked for, by its seed, which no two share.
        fails_at: by seed, the first output position at which logits are broken.
        sizes: decode steps of these numbers of rows read the persistent buffers and nothing else, as a CUDA graph does.
        mixed_sizes: other steps of these numbers of tokens do so too, except for the rows of attention.
    """

    def __init__(
        self,
        model: FakeModel,
        requests: Mapping[int, Request],
        fails_at: Mapping[int, int],
        sizes: Sequence[int] = (),
        mixed_sizes: Sequence[int] = (),
    ) -> None:
        self.num_mixed_replays = 0
        self._model = model
        self._requests = requests
        self._fails_at = fails_at
        self._sizes = sizes
        self._mixed_sizes = mixed_sizes

    def make_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> Any:
        """A `ShadowCache`."""
        return ShadowCache(num_blocks, block_size)

    def compile_step(
        self,
        step: Step,
        largest: StepInputs,
        decode_sizes: Sequence[int] = (),
        mixed_sizes: Sequence[int] = (),
        mixes_torch: bool = False,
        yields_logits: bool = True,
    ) -> Step:
        """Steps of the sizes read `largest`."""

        def replay(inputs: StepInputs) -> torch.Tensor:
            num_reqs, num_tokens = inputs.metadata.num_reqs, len(inputs.input_ids)
            if inputs.input_ids.data_ptr() != largest.input_ids.data_ptr():
                raise OracleViolation("the batch is not where the step was recorded")
            is_decode = inputs.metadata.max_query_len == 1
            size, sizes = (num_reqs, self._sizes) if is_decode else (num_tokens, self._mixed_sizes)
            if not sizes or size > sizes[-1]:
                return step(inputs)
            if size not in sizes:
                raise OracleViolation(f"a step of {num_reqs} rows, {num_tokens} tokens; recorded are {sizes}")
            if is_decode:
                return step(decode_inputs(largest, num_reqs))[: len(inputs.logits_indices)]
            self.num_mixed_replays += 1
            recorded = mixed_inputs(largest, num_tokens)
            metadata = replace(inputs.metadata, slot_mapping=recorded.metadata.slot_mapping)
            return step(replace(recorded, metadata=metadata))[: len(inputs.logits_indices)]

        return replay

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws from chains.

        Raises: OracleViolation: a row is not sampled as its request wants.
        """
        num_rows, width = len(logits), max(0, batch.max_top_logprobs)
        sampled = SampledTokens(
            token_ids=torch.full((num_rows,), -1, dtype=torch.int64),
            status=torch.zeros(num_rows, dtype=torch.int8),
            logprobs=torch.full((num_rows,), float("nan"), dtype=torch.float64),
            top_ids=torch.full((num_rows, width), -1, dtype=torch.int64),
            top_values=torch.full((num_rows, width), float("nan"), dtype=torch.float64),
        )
        forced_ids = [-1] * num_rows if batch.forced_ids is None else batch.forced_ids.tolist()
        num_drawn = forced_ids.count(-1)
        requests = [self._request_of(i, seed) for i, seed in enumerate(batch.seed[:num_drawn].tolist())]
        self._check_hints(batch, [request.params for request in requests])
        if (ends := (int(batch.bias_start[0]), int(batch.bias_start[-1]))) != (0, len(batch.bias_ids)):
            raise OracleViolation(f"biases {ends} of {len(batch.bias_ids)}")
        for i, (chain, _) in enumerate(logits[num_drawn:].tolist(), num_drawn):
            self._check_forced(batch, i)
            logprobs = self._model.logprobs(chain, forced_ids[i], int(batch.top_logprobs[i]))
            _write_logprobs(sampled, i, forced_ids[i], logprobs)
        for i, ((chain, num_tokens), request) in enumerate(zip(logits[:num_drawn].tolist(), requests, strict=True)):
            params, position = request.params, num_tokens - request.num_prompt_tokens
            self._check_row(batch, i, request, num_tokens, chain)
            fails_at = self._fails_at.get(params.seed, 1 << 62)
            if position <= fails_at:  # behind a token that failed there is nothing to keep to
                self._check_mask(batch, i, request.constraint, chain)
            if position >= fails_at:
                sampled.status[i] = RowStatus.BAD_LOGITS
                continue
            token_id = self._model.sample(chain, num_tokens, position, params)
            sampled.token_ids[i] = token_id
            if params.top_logprobs is not None:
                _write_logprobs(sampled, i, token_id, self._model.logprobs(chain, token_id, params.top_logprobs))
        return sampled

    def _request_of(self, row: int, seed: int) -> Request:
        request = self._requests.get(seed % 2**64)
        if request is None:
            raise OracleViolation(f"row {row} has seed {seed}, which no request has")
        return request

    def _check_hints(self, batch: SamplingBatch, rows: Sequence[SamplingParams]) -> None:
        """What the host says of all rows together must be true, and no more than that."""
        random = [params for params in rows if params.temperature > 0]
        filtered = (0 < p.top_k < self._model.vocab_size or p.top_p < 1 or p.min_p > 0 for p in random)
        wanted = (any(map(is_penalised, rows)), bool(random), any(filtered))
        if (got := (batch.any_penalised, batch.any_random, batch.any_filtered)) != wanted:
            raise OracleViolation(f"rows are said to be penalised, random, filtered: {got}, they are {wanted}")

    def _check_row(self, batch: SamplingBatch, i: int, request: Request, num_tokens: int, chain: int) -> None:
        params, num_prompt_tokens = request.params, request.num_prompt_tokens
        wanted = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_k": min(params.top_k, self._model.vocab_size),
            "position": num_tokens - num_prompt_tokens,
            "top_logprobs": -1 if params.top_logprobs is None else params.top_logprobs,
            "num_prompt_tokens": num_prompt_tokens,
            "num_tokens": num_tokens,
        }
        for name, value in wanted.items():
            if (got := getattr(batch, name)[i].item()) != value:
                raise OracleViolation(f"row {i} has {name} {got}, its request {value}")
        entries = slice(int(batch.bias_start[i]), int(batch.bias_start[i + 1]))
        biases = list(zip(batch.bias_ids[entries].tolist(), batch.bias_values[entries].tolist(), strict=True))
        if biases != self._biases(params, num_tokens - num_prompt_tokens):
            raise OracleViolation(f"row {i} has biases {biases}, its request has others")
        if is_penalised(params):
            history = batch.history[int(batch.history_row[i]), :num_tokens].tolist()
            seen = self._model.root(b"")
            for position, token_id in enumerate(history):
                seen = self._model.extend(seen, token_id, position)
            if seen != chain:
                raise OracleViolation(f"row {i} has history {history}, which is not its own")

    def _check_forced(self, batch: SamplingBatch, i: int) -> None:
        """A prompt token becomes what it is without any work: no penalties, no bias, no mask, nothing drawn."""
        penalties = (batch.repetition_penalty[i], batch.presence_penalty[i], batch.frequency_penalty[i])
        entries = batch.bias_start[i : i + 2].tolist()
        mask = -1 if batch.masks is None else int(batch.masks.rows[i])
        got = (float(batch.temperature[i]), tuple(map(float, penalties)), entries[1] - entries[0], mask)
        if got != (0.0, (1.0, 0.0, 0.0), 0, -1) or int(batch.forced_ids[i]) < 0:  # type: ignore[index]
            raise OracleViolation(f"row {i} is of a prompt, and has {got}")

    def _check_mask(self, batch: SamplingBatch, i: int, constraint: Constraint | None, chain: int) -> None:
        mask = -1 if batch.masks is None else int(batch.masks.rows[i])
        if (mask >= 0) != (constraint is not None):
            raise OracleViolation(f"row {i} has mask {mask}, its request has {constraint}")
        if batch.masks is None or constraint is None:
            return
        wanted = np.full(num_words(self._model.vocab_size), chain_word(chain), dtype=np.int32)
        if not constraint.is_dynamic:
            constraint.fill(wanted)
        if (got := batch.masks.words[mask].tolist()) != wanted.tolist():
            raise OracleViolation(f"row {i} has mask {got}, its tokens ask for {wanted}")

    def _biases(self, params: SamplingParams, position: int) -> list[tuple[int, float]]:
        forbidden: set[int] = set()
        if position < params.min_tokens:
            forbidden = set(params.stop_token_ids) | (set() if params.ignore_end_token else self._model.end_token_ids)
        return [*params.logit_bias, *((token_id, float("-inf")) for token_id in sorted(forbidden))]


def _write_logprobs(sampled: SampledTokens, row: int, token_id: int, logprobs: TokenLogprobs) -> None:
    num_top = len(logprobs.top_ids)
    sampled.token_ids[row] = token_id
    sampled.logprobs[row] = logprobs.chosen
    sampled.top_ids[row, :num_top] = torch.tensor(logprobs.top_ids, dtype=torch.int64)
    sampled.top_values[row, :num_top] = torch.tensor(logprobs.top_values, dtype=torch.float64)


def is_penalised(params: SamplingParams) -> bool:
    """Whether drawing needs the history."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)


class PoisoningRunner(TorchModelRunner):
    """Spoils every buffer before it is filled: what a step does not bring along, or has not yielded yet, is wrong."""

    def _launch(self, plan: SchedulerOutput) -> StepInFlight:
        results = self._results[0]
        for tensor in (results.token_ids, results.status, results.logprobs, results.top_ids, results.top_values):
            tensor.fill_(POISON)
        return super()._launch(plan)

    def _compute(self, step: StepInFlight) -> None:
        batch = step.batch
        for section in fields(batch.sections):
            getattr(batch.sections, section.name).fill_(POISON)
        batch.inputs.metadata.block_table.fill_(POISON)
        super()._compute(step)
