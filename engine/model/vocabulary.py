"""Embedding and output head: two matrices [vocab_size, hidden_size], or one that serves as both."""

import torch

from engine.model.checkpoint_part import CheckpointPart, Fill, Recall, Span, pack_anew
from engine.model.config import ModelConfig
from engine.model.gguf_matrix import GgufMatrix
from engine.model.gguf_weights import GgufWeights
from engine.model.int_matrix import IntMatrix
from engine.model.int_weights import IntWeights
from engine.model.linear import Kept
from engine.model.output_head import EMBEDDING, HEAD
from engine.model.sharding import Sharding
from engine.parallel.group import ParallelGroup
from kernels.grouped_weights import GroupedWeights
from kernels.interface import KernelOps, LinearWeights, Table

_META = torch.device("meta")


class Vocabulary:
    """Embeds tokens and computes logits; a rank holds the rows of its tokens.

    Matrices in the blocks of a GGUF file, or in integers of MLX, stay so unless ranks share them or the embedding is
    scaled.

    Attributes:
        table: the embedding, in units of the residual stream; None before `load`.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: KernelOps,
        group: ParallelGroup,
        sharding: Sharding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates nothing yet."""
        self.table: Table = None
        self._packed_head: LinearWeights = None
        self._config, self._ops, self._group = config, ops, group
        self._dtype, self._device = dtype, device
        self._tokens, self._num_rows = sharding.vocabulary, sharding.vocabulary_rows
        self._columns = Span.whole(config.hidden_size)
        self._scale = config.traits.embedding_scale / config.traits.stream_unit

    @property
    def shares_head(self) -> bool:
        """Whether embedding and output head are the same numbers."""
        return self._config.tie_word_embeddings and self._scale == 1.0

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a matrix that it fills, without memory."""
        parts: dict[str, CheckpointPart] = {}
        for name in (EMBEDDING,) if self._config.tie_word_embeddings else (EMBEDDING, HEAD):
            parts |= self._allocate(name, _META).parts()
        return parts

    def load(self, fill: Fill, recall: Recall = pack_anew) -> None:
        """Reads and packs the matrices, one at a time, or recalls both."""
        self.table, self._packed_head = recall(EMBEDDING, lambda: self._load(fill))

    def _load(self, fill: Fill) -> tuple[Table, LinearWeights]:
        embedding = self._read(EMBEDDING, fill)
        if self.shares_head:
            return self._ops.pack_tied(embedding, self._dtype)
        head: LinearWeights = None
        if self._scale != 1.0:
            if self._config.tie_word_embeddings:
                head = self._pack_head(embedding.clone() if isinstance(embedding, torch.Tensor) else embedding)
            if isinstance(embedding, GroupedWeights):
                embedding = embedding.dequantized(self._dtype)
            embedding.mul_(self._scale)
        table = self._ops.pack_table(embedding, self._dtype)
        del embedding
        if not self._config.tie_word_embeddings:
            head = self._pack_head(self._read(HEAD, fill))
        return table, head

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]: each rank embeds the tokens of its rows, and adds zeros for the others."""
        if self._group.size == 1:
            return self._ops.gather_rows(self.table, input_ids)
        rows = input_ids - self._tokens.start
        is_here = (rows >= 0) & (rows < self._tokens.size)
        known = self._ops.gather_rows(self.table, torch.where(is_here, rows, 0))
        return self._group.all_reduce(torch.where(is_here[:, None], known, 0.0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size], of all ranks."""
        logits = self._group.all_gather_columns(self._ops.linear(hidden, self._packed_head))
        vocab_size = self._config.vocab_size
        if logits.shape[1] != vocab_size:  # remove the padding rows of the last ranks
            logits = logits[:, :vocab_size].contiguous()
        return logits

    def packed_bytes(self, *, is_head_int8: bool, kept: Kept, is_compact: bool) -> int:
        """Returns the bytes of the packed matrices.

        Args:
            is_head_int8: whether the head is quantised on load, to int8 with a scale per row.
            kept: kinds of quantised weights that stay as they are in a head; others are converted to dtype.
            is_compact: whether they stay so in an embedding too; and see `GgufWeights.packed_bytes`.
        """
        num_values = self._num_rows * self._columns.size
        head = EMBEDDING if self.shares_head else HEAD
        table_bytes = self._bytes_in_blocks(EMBEDDING, kept, is_compact=True) if is_compact else None
        head_bytes = self._bytes_in_blocks(head, kept, is_compact=is_compact)
        is_one_matrix = self.shares_head and not is_head_int8 and (table_bytes is None) == (head_bytes is None)
        if is_head_int8:
            head_bytes = num_values + 4 * self._num_rows
        dense_bytes = num_values * self._dtype.itemsize
        sizes = [dense_bytes if size is None else size for size in (table_bytes, head_bytes)]
        return sizes[0] if is_one_matrix else sum(sizes)

    def _bytes_in_blocks(self, name: str, kept: Kept, *, is_compact: bool) -> int | None:
        """Returns the bytes of a matrix that stays in integers; None: it does not."""
        stored = self._stored(name)
        if stored is None or not isinstance(stored, kept) or not self._stays(name):
            return None
        return stored.packed_bytes((name,), self._num_rows, self._columns.size, is_compact=is_compact)

    def _stored(self, name: str) -> GgufWeights | IntWeights | None:
        """Returns how a matrix is read in integers; None: as numbers, to which a GGUF file's blocks are converted."""
        stored = self._config.quantized
        if isinstance(stored, IntWeights):
            return stored if stored.has_vocabulary and stored.holds(name) else None
        if not isinstance(stored, GgufWeights) or not stored.holds(name):
            return None
        return stored if self._stays(name) else None

    def _stays(self, name: str) -> bool:
        """Whether a matrix in integers stays so."""
        return self._group.size == 1 and (name != EMBEDDING or self._scale == 1.0)

    def _allocate(self, name: str, device: torch.device) -> "GgufMatrix | IntMatrix | _DenseMatrix":
        stored = self._stored(name)
        if isinstance(stored, IntWeights):
            return IntMatrix(stored, {name: self._tokens}, self._columns, self._dtype, device)
        if stored is not None:
            return GgufMatrix(stored, {name: self._tokens}, self._columns, self._dtype, device)
        return _DenseMatrix(name, self._tokens, self._num_rows, self._columns, self._dtype, device)

    def _read(self, name: str, fill: Fill) -> torch.Tensor | GroupedWeights:
        matrix = self._allocate(name, self._device)
        fill(matrix.parts())
        weights = matrix.weights()
        if self._group.size == 1 or isinstance(weights, torch.Tensor):
            return weights
        padding = weights.values.new_zeros(self._num_rows - self._tokens.size, self._columns.size, dtype=self._dtype)
        return torch.cat((weights.dequantized(self._dtype), padding))

    def _pack_head(self, matrix: torch.Tensor | GroupedWeights) -> LinearWeights:
        if isinstance(matrix, GroupedWeights):
            return self._ops.pack_grouped(matrix, None, self._dtype)
        return self._ops.pack_linear(matrix, None, for_logits=True)


class _DenseMatrix:
    """Rows of tokens, and zeros below them."""

    def __init__(
        self, name: str, tokens: Span, num_rows: int, columns: Span, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name, self._spans = name, (tokens, columns)
        self._matrix = torch.empty(num_rows, columns.size, dtype=dtype, device=device)
        self._matrix[tokens.size :].zero_()

    def parts(self) -> dict[str, CheckpointPart]:
        return {f"{self._name}.weight": CheckpointPart(self._matrix[: self._spans[0].size], self._spans)}

    def weights(self) -> torch.Tensor:
        return self._matrix
