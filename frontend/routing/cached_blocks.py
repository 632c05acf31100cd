"""The prefix cache of an engine as it reports it: which blocks it holds, and how much of a prompt they cover. Pure."""

from collections.abc import Iterable

from chairlift.service.engine_protocol import BYTES_PER_TOKEN_ID

MAX_BLOCKS = 1 << 17
"""Most blocks remembered of one engine: 2 million tokens at 16 a block, in about 40 MB. Those reported longest ago are
forgotten beyond it.
"""
_MAX_BLOCK_BYTES = 1024 * BYTES_PER_TOKEN_ID


class CachedBlocks:
    """Blocks by their content and the block before them, so that a prompt is found without the engine's hash function.

    Invariant: at most `max_blocks` blocks, each with one place in the chain.

    Attributes:
        is_followed: whether the engine reports its cache now; if not, what is known here means nothing.
    """

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.is_followed = False
        self._max_blocks = max_blocks
        self._names: dict[tuple[int | None, bytes], int] = {}  # (parent's name, token ids) -> name
        self._places: dict[int, tuple[int | None, bytes]] = {}  # the inverse, oldest first
        self._block_bytes = 0

    def __len__(self) -> int:
        return len(self._places)

    def store(self, parent: int | None, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Takes consecutive blocks that entered the cache.

        Args:
            parent: name of the block before the first one; None: a prompt begins with it.
            blocks: name and token ids (four bytes each) of each block. The first one of all decides their size: a model
                with several kinds of attention has groups of blocks, which may be of other sizes.
        """
        for name, token_ids in blocks:
            if not self._block_bytes and len(token_ids) <= _MAX_BLOCK_BYTES:
                self._block_bytes = len(token_ids)
            if len(token_ids) == self._block_bytes > 0:
                self._forget(name)
                place = (parent, token_ids)
                if place in self._names:  # the same content under another name
                    del self._places[self._names[place]]
                self._names[place] = name
                self._places[name] = place
            parent = name
        while len(self._places) > self._max_blocks:
            self._forget(next(iter(self._places)))

    def remove(self, names: Iterable[int]) -> None:
        """Takes blocks that left the cache; unknown ones are ignored."""
        for name in names:
            self._forget(name)

    def clear(self) -> None:
        """Forgets all blocks."""
        self._names.clear()
        self._places.clear()
        self._block_bytes = 0

    def num_cached_tokens(self, prompt: bytes) -> int:
        """Returns how many tokens at the beginning of a prompt the cache holds.

        Args:
            prompt: the token ids, four bytes each.
        """
        size, start, name = self._block_bytes, 0, None
        while size and start + size <= len(prompt):
            name = self._names.get((name, prompt[start : start + size]))
            if name is None:
                break
            start += size
        return start // BYTES_PER_TOKEN_ID

    def _forget(self, name: int) -> None:
        place = self._places.pop(name, None)
        if place is not None:
            del self._names[place]
