"""How the layers of a model share block tables when some attend to a sliding window only.

Layers are divided into groups of about equal size; a block holds a few tokens in all layers of one group, and every
request has one block table per group. In the groups with a window a request returns the blocks that its next token no
longer sees, so that a long context takes the memory of the full layers and of one window (as vLLM's hybrid allocator).
All groups take their blocks from one pool, which therefore needs no fixed division between them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups, those without a window first.

    Attributes:
        num_full: groups whose layers attend to the whole context, 0 or 1.
        num_windowed: groups whose layers attend to the last `window` tokens.
        window: in tokens, including the token that attends; the largest one of the model's layers.
    """

    num_full: int = 1
    num_windowed: int = 0
    window: int = 0

    @property
    def num_groups(self) -> int:
        """Block tables of a request."""
        return self.num_full + self.num_windowed

    def first_block(self, num_computed_tokens: int, block_size: int) -> int:
        """Returns the index of the first block with a window that the next token of a request sees."""
        return max(0, num_computed_tokens + 1 - self.window) // block_size

    def most_windowed_blocks(self, step_tokens: int, block_size: int) -> int:
        """Returns the most blocks that a request holds in one group with a window: it frees some when one is full.

        Args:
            step_tokens: most tokens of one request in all steps in flight.
            block_size: tokens per block.
        """
        return -(-(self.window + step_tokens) // block_size) + 2

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Returns the most blocks that a request of `num_tokens` tokens holds at once, in all groups."""
        num_blocks = -(-num_tokens // block_size)
        num_windowed = min(num_blocks, self.most_windowed_blocks(step_tokens, block_size))
        return self.num_full * num_blocks + self.num_windowed * num_windowed

    def longest(self, num_blocks: int, step_tokens: int, block_size: int) -> int | None:
        """Returns the tokens of the longest request that fits in `num_blocks` blocks; None: any length fits."""
        num_most = self.most_windowed_blocks(step_tokens, block_size)
        if num_blocks < self.num_groups * num_most:
            return num_blocks // self.num_groups * block_size
        if not self.num_full:
            return None
        return (num_blocks - self.num_windowed * num_most) // self.num_full * block_size


ONE_GROUP = CacheGroups()
