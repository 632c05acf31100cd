"""Prompts as token ids: the trace's lengths exactly, the trace's sharing exactly, and nothing else in common.

Pure, and the same in every process: a token is a function of (salt, trace digest, block id, position) alone. The
function is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) read at any
position, as a counter.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import OptionError, TraceError
from loadgen.trace.schema import Trace

Words64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNSTATED_FIRST_ID, _UNSTATED_SIZE = 1_000, 30_000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids prompts are made of: first_id to size, the special ones left out.

    Raises: OptionError: fewer than two ids are left.
    """

    size: int
    special_ids: frozenset[int] = frozenset()
    first_id: int = 0
    ids: NDArray[np.uint32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = np.setdiff1d(np.arange(self.first_id, self.size), np.fromiter(self.special_ids, np.int64))
        if len(ids) < 2:
            raise OptionError(
                f"a vocabulary of {self.size} tokens without the {len(self.special_ids)} special ones has "
                f"{len(ids)} left, prompts need 2: set --vocab-size"
            )
        object.__setattr__(self, "ids", ids.astype(np.uint32))

    @staticmethod
    def of(vocab_size: int | None, special_ids: frozenset[int]) -> "Vocabulary":
        """That of a server. Where it does not say its size: ids that every usual model has for plain text."""
        if vocab_size is None:
            return Vocabulary(_UNSTATED_SIZE, special_ids, _UNSTATED_FIRST_ID)
        return Vocabulary(vocab_size, special_ids)

    @staticmethod
    def common(vocab_sizes: Sequence[int | None], special_ids: frozenset[int]) -> "Vocabulary":
        """The ids that several servers have, with the special ones of all of them."""
        if all(size is None for size in vocab_sizes):
            return Vocabulary.of(None, special_ids)
        return Vocabulary(min(_UNSTATED_SIZE if size is None else size for size in vocab_sizes), special_ids)


class PromptMaker:
    """The prompts of one workload.

    Requests whose trace names blocks are made of them, each block in full and the last one cut: two prompts share
    exactly the blocks whose ids they share, and a cut block is the beginning of the full one. A request without blocks
    shares nothing with any other: sharing is never invented.

    Args:
        salt: another salt, other prompts: a server's cache of an earlier run is of no use to this one.
        workload: what is run; its digest and, without blocks, its rows enter the prompts.
        vocabulary: ids to draw from.
    """

    def __init__(self, salt: str, workload: Trace, vocabulary: Vocabulary) -> None:
        self._workload = workload
        self._ids = vocabulary.ids
        self._block_key = _key("block", salt, workload.digest)
        self._row_key = _key("row", salt, workload.digest)

    def token_ids(self, index: int) -> NDArray[np.uint32]:
        """The prompt of a request.

        Returns: [input_tokens[index]] uint32.
        Raises: TraceError: its blocks are shorter than the prompt.
        """
        length = int(self._workload.input_tokens[index])
        blocks = self._workload.blocks
        block_ids = None if blocks is None else blocks.of(index)
        if blocks is None or block_ids is None or len(block_ids) == 0:
            row = self._workload.rows[index : index + 1].astype(np.uint64)
            words = _words(_mix(self._row_key + row * _GOLDEN), length)
        else:
            if len(block_ids) * blocks.block_tokens < length:
                raise TraceError(
                    f"{self._workload.name}, row {self._workload.rows[index]}: {len(block_ids)} blocks of "
                    f"{blocks.block_tokens} tokens do not make a prompt of {length}"
                )
            words = _words(_mix(self._block_key + block_ids.astype(np.uint64) * _GOLDEN), blocks.block_tokens)[:length]
        # The upper half times the size, shifted back: an even choice without a division (Lemire, arXiv:1805.10941).
        chosen = ((words >> np.uint64(32)) * np.uint64(len(self._ids))) >> np.uint64(32)
        return np.take(self._ids, chosen.astype(np.int64))


def _words(keys: Words64, count: int) -> Words64:
    """[keys * count]: `count` numbers of each key, one key after the other."""
    positions = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    return _mix((keys[:, None] + positions[None, :]).ravel())


def _mix(words: Words64) -> Words64:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _key(kind: str, salt: str, digest: str) -> Words64:
    """[1] uint64."""
    hashed = hashlib.sha256("\0".join((kind, salt, digest)).encode()).digest()
    return np.frombuffer(hashed[:8], dtype="<u8").astype(np.uint64)
