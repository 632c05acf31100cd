"""Copies of requests' states, with which prefixes are reused by models that keep state besides keys and values.

Such a state (a gated delta rule, a convolution) holds all tokens up to one position and cannot go back. Keys and values
of a prefix are therefore useful only together with a copy of the state at its end. Copies are kept at three places, as
in Marconi (arXiv:2411.19379): where the prompts of two requests have parted, near the end of a prompt, and every few
tokens of an answer, where a copy replaces the one before.

A copy is made at the beginning of the step that goes on from its position. It is known by the hash of the last block
before it, so that equal hashes mean equal tokens under an equal salt and adapter. Restoring comes before saving in a
step, and steps follow each other on the device: a slot may be overwritten by the plan that also reads it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from engine.core.request import Request, RequestId
from engine.errors import IntegrityError

_MIN_SAVED_TOKENS = 128
"""Tokens that a copy within a prompt saves at least: it costs a step of its own for the rest of the prompt."""

_ANSWER_STRIDE = 64
"""Tokens from one copy within an answer to the next: each moves megabytes."""

_TURN_TOKENS = 8
"""Tokens at the end of a prompt that the next turn of a conversation may not repeat: chat templates begin an answer
with some that they leave out of the history, such as those of an empty thought."""


class SavedState(NamedTuple):
    """A copy of a request's state, made at the beginning of a step.

    Attributes:
        request_id: the request, which has a row in the step.
        snapshot: number of the slot that it is copied to.
    """

    request_id: RequestId
    snapshot: int


class StateSnapshots:
    """Slots for copies, the least recently used of which is replaced.

    Invariants: a slot is free, or holds the copy of one hash, or waits for the step that fills it.
    """

    def __init__(self, num_snapshots: int) -> None:
        """All slots are free."""
        self._num_snapshots = num_snapshots
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pending: dict[int, bytes] = {}
        self._answers: dict[RequestId, tuple[bytes, int]] = {}  # the copy that the answer's next one replaces

    def num_blocks(self, hashes: Sequence[bytes]) -> int:
        """Returns the blocks of the longest prefix with a copy; hashes: those of its blocks."""
        return next((index for index in range(len(hashes), 0, -1) if hashes[index - 1] in self._slot_of), 0)

    def use(self, block_hash: bytes) -> int:
        """Returns the slot of a copy, which counts as used now."""
        self._slot_of.move_to_end(block_hash)
        return self._slot_of[block_hash]

    def points(self, request: Request, num_restored: int, num_cached: int, block_size: int) -> tuple[int, ...]:
        """Returns where steps of a prompt are to end so that its state is copied, ascending.

        Args:
            request: a request that is being admitted.
            num_restored: tokens of its prefix that are not computed again.
            num_cached: tokens of its prefix whose keys and values are cached: another request went on differently.
            block_size: tokens per block.
        """
        points, last = [], num_restored
        last_point = (request.num_tokens - 2) // block_size * block_size  # at least two tokens follow: no decode
        for point in (min(num_cached, last_point), (request.num_tokens - _TURN_TOKENS) // block_size * block_size):
            if point - last >= _MIN_SAVED_TOKENS:
                points.append(point)
                last = point
        return tuple(points)

    def begin(self, request: Request, position: int, block_hash: bytes, num_running: int) -> SavedState | None:
        """Takes a slot for a copy that the step being planned makes; None: none is due, it exists, or no slot is left.

        Args:
            request: the request.
            position: tokens before it.
            block_hash: of the block before it.
            num_running: requests that run. Answers are copied only if there are two slots for each: for a copy of its
                prompt and one of its answer.
        """
        is_answer = position >= request.num_prompt_tokens
        if is_answer and (position % _ANSWER_STRIDE or self._num_snapshots < 2 * num_running):
            return None
        if self._is_known(block_hash):
            return None
        replaced, slot = self._answers.pop(request.request_id, (b"", -1)) if is_answer else (b"", -1)
        if self._slot_of.get(replaced) == slot:  # otherwise it is gone, or another request has made one since
            del self._slot_of[replaced]
        elif self._free:
            slot = self._free.pop()
        elif self._slot_of:
            _, slot = self._slot_of.popitem(last=False)
        else:
            return None
        self._pending[slot] = block_hash
        if is_answer:
            self._answers[request.request_id] = block_hash, slot
        return SavedState(request.request_id, slot)

    def end(self, slot: int, *, is_kept: bool) -> None:
        """Ends the step that made a copy; is_kept: whether requests may use it."""
        block_hash = self._pending.pop(slot)
        if is_kept:
            self._slot_of[block_hash] = slot
        else:
            self._free.append(slot)

    def leave(self, request: Request) -> None:
        """Forgets which copy the next one of a request's answer would replace; the copy stays."""
        self._answers.pop(request.request_id, None)

    def check_integrity(self) -> None:
        """Checks that each slot is in one state.

        Raises: IntegrityError: it is in none, or in several.
        """
        slots = [*self._free, *self._slot_of.values(), *self._pending]
        if sorted(slots) != list(range(self._num_snapshots)):
            raise IntegrityError(f"slots of states {sorted(slots)}, expected each of {self._num_snapshots} once")

    def _is_known(self, block_hash: bytes) -> bool:
        if block_hash in self._slot_of:
            self._slot_of.move_to_end(block_hash)
            return True
        return block_hash in self._pending.values()
