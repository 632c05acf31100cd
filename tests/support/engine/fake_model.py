"""A model for tests that notices every mistake of the scheduler.

`FakeModelRunner` is the hash-chain shadow-KV oracle. Each slot of its cache stores H(what the previous slot stores,
token, position), a chain that starts from the request's cache salt. A row first walks its block table and requires the
stored chain to be the chain of its own tokens at every position it attends to; only then does it write its own slots
and draw a token from the chain. A block that was reused too early, shared wrongly or not recomputed is an
`OracleViolation` at once, and as rows of all launched plans execute in a seeded random order, late writes are part of
every test. It needs no torch: servers and frontends use it as a fast model.
"""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from chairlift.service.end_reason import EndReason
from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.core.outputs import (
    ModelRunnerOutput,
    NewRequest,
    ScheduledRow,
    SchedulerOutput,
    TokenLogprobs,
)
from engine.core.request import BlockId, RequestId, SamplingParams

_MASK = (1 << 64) - 1


class OracleViolation(AssertionError):  # noqa: N818 - reads as what it is
    """A plan that a real model would have answered with gibberish."""


@dataclass(frozen=True, slots=True)
class SoloAnswer:
    """What a request must yield, whatever runs beside it."""

    token_ids: tuple[int, ...]
    reason: EndReason


class FakeModel:
    """Tokens as a function of everything before them, a seed and a position.

    Args:
        vocab_size: token ids are 0 .. vocab_size - 1.
        end_token_ids: the tokens that end answers.
        end_probability: chance of an end token at each position, so that answers have geometrically spread lengths.
    """

    def __init__(
        self, vocab_size: int = 64, end_token_ids: frozenset[int] = frozenset({0}), end_probability: float = 0.05
    ) -> None:
        self.vocab_size = vocab_size
        self.end_token_ids = end_token_ids
        self.end_probability = end_probability
        self._end_ids = sorted(end_token_ids)
        self._plain_ids = [token_id for token_id in range(vocab_size) if token_id not in end_token_ids]

    def use_tokens(self, num_tokens: int) -> None:
        """Lets answers consist of so many tokens only, besides end tokens."""
        del self._plain_ids[num_tokens:]

    def root(self, cache_salt: bytes) -> int:
        """What a slot before position 0 would store."""
        return int.from_bytes(hashlib.sha256(cache_salt).digest()[:8], "little")

    def extend(self, chain: int, token_id: int, position: int) -> int:
        """What the slot at `position` stores if the one before it stores `chain`."""
        return hash((chain, token_id, position))

    def sample(self, chain: int, position: int, num_output_tokens: int, params: SamplingParams) -> int:
        """The token at `position`, after a last slot that stores `chain`. End and stop tokens are masked before
        `min_tokens`.
        """
        draw = _mix(hash((chain, params.seed, position)))
        masked = num_output_tokens < params.min_tokens
        if not masked and draw / 2**64 < self.end_probability:
            return self._end_ids[draw % len(self._end_ids)]
        allowed = self._plain_ids
        if masked and params.stop_token_ids:
            allowed = [token_id for token_id in allowed if token_id not in params.stop_token_ids] or allowed
        return allowed[_mix(draw) % len(allowed)]

    def logprobs(self, chain: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Made-up log-probabilities: the drawn token leads and each following id is half as likely."""
        values = [-0.5 - 0.25 * (_mix(chain) % 4) - 0.6875 * rank for rank in range(max(1, num_top))]
        top_ids = [(token_id + rank) % self.vocab_size for rank in range(num_top)]
        return TokenLogprobs(values[0], tuple(top_ids), tuple(values[:num_top]))

    def solo_prompt_logprobs(
        self, prompt_ids: Sequence[int], num_top: int, *, cache_salt: bytes = b""
    ) -> list[TokenLogprobs]:
        """Log-probabilities of a prompt's tokens from the second on, computed without scheduler, blocks or batch."""
        chain, result = self.root(cache_salt), []
        for position, (token_id, next_id) in enumerate(pairwise(prompt_ids)):
            chain = self.extend(chain, token_id, position)
            result.append(self.logprobs(chain, next_id, num_top))
        return result

    def solo_output(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        output_ids: Sequence[int] = (),
        cache_salt: bytes = b"",
    ) -> SoloAnswer:
        """The whole answer, those `output_ids` included, computed without scheduler, blocks or batch.

        Args:
            prompt_ids: the prompt.
            params: seed and limits.
            max_model_len: most tokens of prompt and answer.
            output_ids: what was generated earlier.
            cache_salt: of the request.
        """
        output = list(output_ids)
        chain = self.root(cache_salt)
        for position, token_id in enumerate([*prompt_ids, *output]):
            chain = self.extend(chain, token_id, position)
        while True:
            position = len(prompt_ids) + len(output)
            if output and len(output) >= params.min_tokens:
                if output[-1] in self.end_token_ids and not params.ignore_end_token:
                    return SoloAnswer(tuple(output), EndReason.END_TOKEN)
                if output[-1] in params.stop_token_ids:
                    return SoloAnswer(tuple(output), EndReason.STOP_TOKEN)
            if len(output) >= params.max_tokens:
                return SoloAnswer(tuple(output), EndReason.MAX_TOKENS)
            if position >= max_model_len:
                return SoloAnswer(tuple(output), EndReason.CONTEXT_FULL)
            output.append(self.sample(chain, position, len(output), params))
            chain = self.extend(chain, output[-1], position)


_NO_STATE = -1


@dataclass(slots=True)
class _Snapshot:
    """A copy of the state of a request, which is what the slot of its last token stores."""

    state: int = _NO_STATE


class _Sequence:
    """What the runner knows of one request."""

    __slots__ = (
        "block_ids", "chain", "has_failed", "jobs", "next_position", "request", "restored", "state", "token_ids",
    )  # fmt: skip

    def __init__(self, request: NewRequest, root: int, model: FakeModel) -> None:
        self.request = request
        self.token_ids = list(request.token_ids)
        self.chain: list[int] = []  # what the slot of each known token must store
        for position, token_id in enumerate(self.token_ids):
            root = model.extend(root, token_id, position)
            self.chain.append(root)
        self.block_ids = list(request.block_ids)
        self.next_position = -1
        self.has_failed = False
        self.state = _NO_STATE
        self.restored: _Snapshot | None = None
        self.jobs: deque[tuple[_Launched, int]] = deque()  # rows launched and not executed


@dataclass(slots=True)
class _Launched:
    """A plan on its way."""

    plan: SchedulerOutput
    token_ids: list[int]
    num_open_rows: int
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    saved: dict[RequestId, _Snapshot] = field(default_factory=dict)
    draft_tokens: list[tuple[int, ...]] = field(default_factory=list)

    def draft_of(self, index: int) -> tuple[int, ...]:
        """The draft of a row, which may be none."""
        first = len(self.plan.rows) - len(self.plan.drafts)
        return self.plan.drafts[index - first] if index >= first else ()


class FakeModelRunner:
    """Runs plans on a `FakeModel` and a shadow of the KV cache; implements `engine.interfaces.ModelRunner`.

    Plans may be launched ahead. Rows of all launched plans execute in a seeded random order, except that the rows of
    one request keep theirs; when a plan is collected, all its rows have executed, and some of later plans may have.

    Args:
        model: what draws tokens.
        num_blocks, block_size: shape of the cache.
        groups: block tables of a request; blocks of different groups store different values.
        seed: of the order of execution.
        salt_of: the cache salt of a request; plans do not carry it.
        fail: called for every row with the request and the position of the row's last token; what it returns fails the
            row.
        on_step: called with each plan before it is collected: may block, to hold the step, or raise.
        has_state: whether the model keeps a state of each request, which cannot go back.
    """

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        num_blocks: int,
        block_size: int = 16,
        groups: CacheGroups = ONE_GROUP,
        seed: int = 0,
        salt_of: Callable[[RequestId], bytes] = lambda _: b"",
        fail: Callable[[RequestId, int], str | None] = lambda _request_id, _position: None,
        on_step: Callable[[SchedulerOutput], None] = lambda _: None,
        has_state: bool = False,
    ) -> None:
        self.model = model or FakeModel()
        self.num_executed_steps = 0
        self._block_size = block_size
        self._groups = groups
        self._kv = [[0] * block_size for _ in range(num_blocks)]
        self._random = random.Random(seed)
        self._salt_of = salt_of
        self._fail = fail
        self._on_step = on_step
        self._has_state = has_state
        self._snapshots: dict[int, _Snapshot] = {}
        self._sequences: dict[RequestId, _Sequence] = {}
        self._launched: deque[_Launched] = deque()
        self._busy: list[_Sequence] = []  # those with jobs

    def launch(self, plan: SchedulerOutput) -> None:
        """Takes a plan; its rows execute at any time until it is collected.

        Raises: OracleViolation: the plan contradicts itself or what went before.
        """
        for request_id in plan.removed_request_ids:
            if self._sequences.pop(request_id, None) is None:
                raise OracleViolation(f"step {plan.step} removes request {request_id}, which was never new")
        for request in plan.new_requests:
            if request.request_id in self._sequences:
                raise OracleViolation(f"step {plan.step} introduces request {request.request_id} again")
            root = self.model.root(self._salt_of(request.request_id))
            added = self._sequences[request.request_id] = _Sequence(request, root, self.model)
            if request.snapshot is not None:
                added.restored = self._snapshots[request.snapshot]
        num_tokens = sum(row.num_scheduled_tokens for row in plan.rows)
        if num_tokens != plan.num_tokens:
            raise OracleViolation(f"step {plan.step} has {num_tokens} tokens in its rows and says {plan.num_tokens}")
        launched = _Launched(plan, [-1] * len(plan.rows), len(plan.rows), draft_tokens=[()] * len(plan.drafts))
        for index, row in enumerate(plan.rows):
            sequence = self._sequences.get(row.request_id)
            if sequence is None:
                raise OracleViolation(f"step {plan.step} has a row of request {row.request_id}, which is not known")
            if index and row.num_scheduled_tokens == 1 < plan.rows[index - 1].num_scheduled_tokens:
                raise OracleViolation(f"step {plan.step} has a one-token row after a wider one, row {index}")
            sequence.block_ids += row.new_block_ids
            if not sequence.jobs:
                self._busy.append(sequence)
            sequence.jobs.append((launched, index))
        for state in plan.saved_states:
            if state.request_id not in {row.request_id for row in plan.rows}:
                raise OracleViolation(f"step {plan.step} copies the state of request {state.request_id} without a row")
            launched.saved[state.request_id] = self._snapshots[state.snapshot] = _Snapshot()
        self._launched.append(launched)

    def collect(self) -> ModelRunnerOutput:
        """Answers the oldest launched plan.

        Raises: OracleViolation: a row attends to slots that do not hold its own tokens.
        """
        launched = self._launched.popleft()
        self._on_step(launched.plan)
        while launched.num_open_rows:
            index = self._random.randrange(len(self._busy))
            sequence = self._busy[index]
            job = sequence.jobs.popleft()
            if not sequence.jobs:
                self._busy[index] = self._busy[-1]
                self._busy.pop()
            self._execute_row(sequence, *job)
        self.num_executed_steps += 1
        return ModelRunnerOutput(
            launched.plan.step,
            tuple(launched.token_ids),
            launched.logprobs,
            launched.failures,
            launched.prompt_logprobs,
            tuple(launched.draft_tokens),
        )

    def _execute_row(self, sequence: _Sequence, launched: _Launched, index: int) -> None:
        row = launched.plan.rows[index]
        launched.num_open_rows -= 1
        draft = launched.draft_of(index)
        start, stop = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens - len(draft)
        if sequence.restored is not None:
            sequence.state, sequence.restored = sequence.restored.state, None
        if row.request_id in launched.saved:
            launched.saved[row.request_id].state = sequence.state
        detail = self._fail(row.request_id, stop - 1)
        if sequence.has_failed or detail is not None:
            # What a broken row writes is as useless as NaN: a request that shares it must fail.
            sequence.has_failed = True
            launched.failures[index] = detail or "an earlier row failed"
            self._write(sequence, start, [-1] * row.num_scheduled_tokens)
            sequence.state = _NO_STATE
            return
        self._check_row(sequence, row, draft)
        self._attend(sequence, start)
        self._write(sequence, start, sequence.chain[start:stop])
        sequence.next_position = stop
        sequence.state = sequence.chain[stop - 1]
        if row.num_prompt_logits:
            launched.prompt_logprobs[index] = self._score_prompt(sequence, row)
        if row.samples:
            launched.token_ids[index] = self._sample(sequence, launched, index)
        if draft:
            launched.draft_tokens[index - len(launched.token_ids)] = self._verify(sequence, row, draft)

    def _verify(self, sequence: _Sequence, row: ScheduledRow, draft: tuple[int, ...]) -> tuple[int, ...]:
        """Writes the slots of a draft, right or wrong, and draws on as long as it is right; it needs no logprobs."""
        request, start = sequence.request, row.num_computed_tokens
        tokens, chain, wrong = [sequence.token_ids[-1]], sequence.chain[start], []
        for position, token_id in enumerate(draft, start + 1):
            chain = self.model.extend(chain, token_id, position)
            wrong.append(chain)
        self._write(sequence, start + 1, wrong)
        for position, token_id in enumerate(draft, start + 1):
            if token_id != tokens[-1] or self._fail(row.request_id, position) is not None:
                break
            num_output_tokens = position + 1 - request.num_prompt_tokens
            tokens.append(self.model.sample(sequence.chain[-1], position + 1, num_output_tokens, request.params))
            sequence.token_ids.append(tokens[-1])
            sequence.chain.append(self.model.extend(sequence.chain[-1], tokens[-1], position + 1))
        sequence.next_position = start + len(tokens)
        return tuple(tokens)

    def _score_prompt(self, sequence: _Sequence, row: ScheduledRow) -> tuple[TokenLogprobs, ...]:
        num_top = sequence.request.params.prompt_logprobs
        positions = row.prompt_logits(sequence.request.num_prompt_tokens)
        if num_top is None or positions.start < row.num_computed_tokens:
            raise OracleViolation(
                f"request {row.request_id}: logits of positions {positions.start} to {positions.stop - 1} of a row "
                f"from {row.num_computed_tokens} on, prompt_logprobs is {num_top}"
            )
        return tuple(self.model.logprobs(sequence.chain[p], sequence.token_ids[p + 1], num_top) for p in positions)

    def _sample(self, sequence: _Sequence, launched: _Launched, index: int) -> int:
        params, position, chain = sequence.request.params, len(sequence.token_ids), sequence.chain[-1]
        token_id = self.model.sample(chain, position, position - sequence.request.num_prompt_tokens, params)
        if params.top_logprobs is not None:
            launched.logprobs[index] = self.model.logprobs(chain, token_id, params.top_logprobs)
        sequence.token_ids.append(token_id)
        sequence.chain.append(self.model.extend(chain, token_id, position))
        return token_id

    def _check_row(self, sequence: _Sequence, row: ScheduledRow, draft: tuple[int, ...]) -> None:
        """A row must go on where the last one ended, over known tokens and within its block table."""
        start, stop = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens - len(draft)
        what = f"request {row.request_id}, positions {start} to {stop - 1}"
        if row.num_scheduled_tokens < 1:
            raise OracleViolation(f"request {row.request_id} has a row of {row.num_scheduled_tokens} tokens")
        if sequence.next_position not in (-1, start):
            raise OracleViolation(f"{what}: the row before ended at {sequence.next_position - 1}")
        if stop > len(sequence.token_ids):
            raise OracleViolation(f"{what}: only {len(sequence.token_ids)} tokens are known")
        if row.samples != (stop == len(sequence.token_ids)):
            raise OracleViolation(f"{what} of {len(sequence.token_ids)}: samples is {row.samples}")
        num_blocks = len(sequence.block_ids) // self._groups.num_groups
        if self._has_state and start and sequence.state != sequence.chain[start - 1]:
            raise OracleViolation(f"{what}: the state is not that behind position {start - 1}")
        if draft and (stop != start + 1 or sequence.request.params.top_logprobs is not None):
            raise OracleViolation(f"{what}: a draft in a row of {stop - start} known tokens, or with logprobs")
        if stop + len(draft) > num_blocks * self._block_size:
            raise OracleViolation(f"{what}: its block table has {num_blocks} blocks")

    def _attend(self, sequence: _Sequence, num_positions: int) -> None:
        """Requires the first `num_positions` slots to hold the request's own tokens, or those that a window sees."""
        size, groups = self._block_size, self._groups
        for group in range(groups.num_groups):
            first = 0 if group < groups.num_full else max(0, num_positions - groups.window + 1)
            table = sequence.block_ids[group :: groups.num_groups]
            for start in range(first // size * size, num_positions, size):
                block_id = table[start // size]
                for position in range(max(first, start), min(start + size, num_positions)):
                    if self._kv[block_id][position - start] != sequence.chain[position] ^ group:
                        raise OracleViolation(
                            f"request {sequence.request.request_id} attends to position {position}, block {block_id}, "
                            f"slot {position - start}: not its own token there"
                        )

    def _write(self, sequence: _Sequence, start: int, values: Sequence[int]) -> None:
        num_groups = self._groups.num_groups
        for position, value in enumerate(values, start):
            index, offset = divmod(position, self._block_size)
            for group in range(num_groups):
                block_id: BlockId = sequence.block_ids[index * num_groups + group]
                self._kv[block_id][offset] = value ^ group


def _mix(value: int) -> int:
    """Spreads all bits of a 64-bit number over all bits (the finaliser of SplitMix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
