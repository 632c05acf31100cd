"""Unpacks linear layers in integers from the layouts of GPTQ, AWQ, compressed-tensors and MLX.

Words are int32 with 8 or 4 integers, the first in the lowest bits. Shapes of the tensors, with P integers per word:

| | values | scales | zero points | group of each input |
|---|---|---|---|---|
| gptq | qweight [in / P, out] | scales [groups, out] | qzeros [groups, out / P] | g_idx [in] |
| awq | qweight [in, out / P] | scales [groups, out] | qzeros [groups, out / P] | |
| packed | weight_packed [out, in / P] | weight_scale [out, groups] | weight_zero_point [out / P, groups] | as gptq |
| int8 | weight [out, in] | weight_scale [out, groups] | weight_zero_point [out, groups] | |
| mlx | weight [out, in / 32 * bits] | scales [out, groups] | biases [out, groups] | |

MLX has offsets instead of zero points, and integers may continue in the next word. The last tensor of packed is named
weight_g_idx. AWQ has columns 0, 2, 4, 6, 1, 3, 5, 7 in a word. The layouts of
compressed-tensors have signed values and zero points, from -8 or -128; those of packed are stored with that added.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint_part import CheckpointPart, FusedSpan, Rows, Span, stacked
from engine.model.int_weights import IntWeights
from kernels.grouped_weights import GroupedWeights
from kernels.interface import KernelOps, LinearWeights

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of 8 columns is in a word."""


class _Names(NamedTuple):
    """Last parts of the names of tensors in a checkpoint."""

    values: str
    scales: str
    zeros: str
    groups: str = ""


_NAMES = {
    "gptq": _Names("qweight", "scales", "qzeros", "g_idx"),
    "awq": _Names("qweight", "scales", "qzeros"),
    "packed": _Names("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "int8": _Names("weight", "weight_scale", "weight_zero_point"),
    "mlx": _Names("weight", "scales", "biases"),
}
_PER_BITS_OF_WORDS = 32
"""Integers of MLX that take as many words as one has bits."""


class IntMatrix:
    """Integers of 4 or 8 bits with scales and zero points of groups, one set of tensors per projection."""

    def __init__(self, stored: IntWeights, rows: Rows, columns: Span, dtype: torch.dtype, device: torch.device) -> None:
        self._stored, self._rows, self._columns, self._dtype = stored.joint(rows), rows, columns, dtype
        self._parts: dict[str, CheckpointPart] = {}
        for name, span in rows.items():
            for suffix, part in _projection(stored.of(name), span, columns, device).items():
                self._parts[f"{name}.{suffix}"] = part

    def parts(self) -> dict[str, CheckpointPart]:
        """Returns values, scales, zero points and groups of inputs of each projection, as far as they are stored."""
        return self._parts

    def pack(self, ops: KernelOps, bias: torch.Tensor | None, row_order: torch.Tensor | None) -> LinearWeights:
        """Packs the result of `weights` for the operations."""
        return ops.pack_grouped(self.weights(row_order), bias, self._dtype)

    def weights(self, row_order: torch.Tensor | None = None) -> GroupedWeights:
        """Unpacks the integers, and frees what they were read to.

        row_order: see `StoredMatrix.pack`.

        Raises:
            CheckpointError: groups of inputs that no tool writes.
            ConfigError: ranks share inputs whose groups are not contiguous.
        """
        num_bits, zero = self._stored.num_bits, 1 << self._stored.num_bits - 1
        num_rows, num_columns = sum(span.size for span in self._rows.values()), self._columns.size
        order = self._input_order()
        device = next(iter(self._parts.values())).tensor.device
        values = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=device)
        scales, offsets = [], []
        for name, _, below in stacked(self._rows):
            unpacked = self._unpacked(name)
            values[below] = unpacked if order is None else unpacked[:, order]
            scale = self._tensor(name, "scales")
            scale = scale.t() if self._is_transposed else scale.view(len(scale), -1)
            if self._stored.layout == "mlx":
                scale, offset = (
                    self._in_joint_groups(name, scale),
                    self._in_joint_groups(name, self._tensor(name, "zeros")),
                )
                offsets.append(offset)
            else:
                zeros = self._zeros(name) if self._stored.has_zero_points else torch.full_like(scale, zero)
                offsets.append(-zeros * scale)
            scales.append(scale)
        self._parts = {}
        all_scales, all_offsets = torch.cat(scales), torch.cat(offsets)
        if row_order is not None:
            values, all_scales, all_offsets = values[row_order], all_scales[row_order], all_offsets[row_order]
        return GroupedWeights(values, all_scales, all_offsets, num_bits, order, self._stored.quantizes_inputs)

    def _in_joint_groups(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Returns numbers [rows, groups] of a projection for each group of the matrix, which may be smaller."""
        own, joint = self._stored.of(name).group_size, self._stored.group_size
        return numbers if own == joint or own is None or joint is None else numbers.repeat_interleave(own // joint, 1)

    @property
    def _is_transposed(self) -> bool:
        return self._stored.layout in ("gptq", "awq")

    def _tensor(self, name: str, kind: str) -> torch.Tensor:
        return self._parts[f"{name}.{getattr(_NAMES[self._stored.layout], kind)}"].tensor

    def _unpacked(self, name: str) -> torch.Tensor:
        """Returns unsigned values [rows, columns] of a projection."""
        words, num_bits = self._tensor(name, "values"), self._stored.num_bits
        match self._stored.layout:
            case "gptq":
                return _integers(words.t(), num_bits)
            case "awq":
                return _awq_integers(words).t()
            case "packed":
                return _integers(words, num_bits)
            case "int8":
                return _unsigned(words)
            case "mlx":
                return _stream_of_integers(words, self._stored.of(name).bits_in_file)

    def _zeros(self, name: str) -> torch.Tensor:
        """Returns zero points [rows, groups] of a projection, in fp32."""
        words, num_bits = self._tensor(name, "zeros"), self._stored.num_bits
        match self._stored.layout:
            case "gptq":
                return _integers(words, num_bits).t().float() + self._stored.stored_zero
            case "awq":
                return _awq_integers(words).t().float()
            case "packed":
                return _integers(words.t(), num_bits).t().float()
            case "int8":
                return _unsigned(words).float()
            case "mlx":
                raise AssertionError("MLX has offsets")

    def _input_order(self) -> torch.Tensor | None:
        """Returns the order of inputs that makes groups contiguous; None if they are."""
        size = self._stored.group_size
        if not self._stored.has_input_order or size is None:
            return None
        first, *others = ((name, self._tensor(name, "groups")) for name in self._rows)
        for name, groups in others:
            if not torch.equal(groups, first[1]):
                raise CheckpointError(
                    f"{name} and {first[0]} have different groups of inputs (g_idx): they form one matrix"
                )
        groups, start = first[1], self._columns.start
        inputs = torch.arange(start, start + len(groups), device=groups.device)
        if torch.equal(groups, (inputs // size).to(groups.dtype)):
            return None
        if self._columns.size != self._columns.total:
            raise ConfigError(
                f"--tensor-parallel-size is not supported for {first[0]}, whose groups of inputs are not contiguous "
                "(desc_act): use one rank, or a checkpoint without desc_act"
            )
        counts = torch.bincount(groups.clamp(min=0).long(), minlength=len(groups) // size)
        if groups.min() < 0 or len(counts) != len(groups) // size or (counts != size).any():
            raise CheckpointError(f"{first[0]}: g_idx has groups that are not of {size} inputs each")
        return groups.argsort(stable=True)


def check_int_matrix(stored: IntWeights, rows: Rows, columns: Span) -> None:
    """Checks that groups and words divide projections, or the shards of them that a rank holds.

    Raises:
        CheckpointError: they do not divide the matrices.
        ConfigError: they do not divide the shards.
    """
    for name, span in rows.items():
        own = stored.of(name)
        per_column, per_row = max(own.group_size or 1, own.per_word), own.per_word
        for what, unit, parts in (("inputs", per_column, columns.parts), ("outputs", per_row, span.parts)):
            if any(part.total % unit for part in parts):
                raise CheckpointError(
                    f"quantization_config: {name} has {sum(part.total for part in parts)} {what}, not a multiple of "
                    f"{unit}, which a group or a word holds"
                )
            if any(number % unit for part in parts for number in (part.start, part.size)):
                raise ConfigError(
                    f"--tensor-parallel-size gives each rank {sum(part.size for part in parts)} {what} of {name}, not "
                    f"a multiple of {unit}, which a group or a word holds: use fewer ranks"
                )


def int_matrix_shape(stored: IntWeights, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """Returns rows and columns of a module's matrix by the shapes of tensors; None: it is not stored in integers."""
    stored = stored.of(module)
    names = _NAMES[stored.layout]
    shape = shapes.get(f"{module}.{names.values}", ())
    if f"{module}.{names.scales}" not in shapes or len(shape) != 2:
        return None
    match stored.layout:
        case "gptq":
            return shape[1], shape[0] * stored.per_word
        case "awq":
            return shape[1] * stored.per_word, shape[0]
        case "packed" | "int8":
            return shape[0], shape[1] * stored.per_word
        case "mlx":
            return shape[0], shape[1] * _PER_BITS_OF_WORDS // stored.bits_in_file


def _projection(
    stored: IntWeights, rows: Span | FusedSpan, columns: Span, device: torch.device
) -> dict[str, CheckpointPart]:
    """Allocates the tensors of a projection."""
    names, per_word = _NAMES[stored.layout], stored.per_word
    groups = Span.whole(1) if stored.group_size is None else columns.in_blocks(stored.group_size)

    def part(dtype: torch.dtype, *spans: Span | FusedSpan, is_scale: bool = False) -> CheckpointPart:
        shape = [span.size for span in spans]
        return CheckpointPart(torch.empty(shape, dtype=dtype, device=device), spans, is_scale)

    match stored.layout:
        case "gptq" | "awq":
            words = (
                (columns.in_blocks(per_word), rows) if stored.layout == "gptq" else (columns, rows.in_blocks(per_word))
            )
            parts = {
                names.values: part(torch.int32, *words),
                names.scales: part(torch.float32, groups, rows),
                names.zeros: part(torch.int32, groups, rows.in_blocks(per_word)),
            }
        case "packed" | "int8":
            dtype = torch.int32 if stored.layout == "packed" else torch.int8
            is_per_row = stored.group_size is None
            parts = {
                names.values: part(dtype, rows, columns.in_blocks(per_word)),
                names.scales: part(torch.float32, *((rows,) if is_per_row else (rows, groups)), is_scale=is_per_row),
            }
            if stored.has_zero_points:
                parts[names.zeros] = part(dtype, rows.in_blocks(per_word), groups)
        case "mlx":
            parts = {
                names.values: part(torch.int32, rows, columns.in_blocks(_PER_BITS_OF_WORDS).times(stored.bits_in_file)),
                names.scales: part(torch.float32, rows, groups),
                names.zeros: part(torch.float32, rows, groups),
            }
    if stored.has_input_order:
        parts[names.groups] = part(torch.int32, columns)
    return parts


def _integers(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """[rows, n] int32 -> [rows, n * 32 / num_bits] uint8."""
    cells = words.contiguous().view(torch.uint8)
    return cells if num_bits == 8 else torch.stack((cells & 15, cells >> 4), dim=-1).flatten(-2)


def _stream_of_integers(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """[rows, n] int32 -> [rows, n * 32 / num_bits] uint8, of which 8 take as many bytes as one has bits."""
    if num_bits in (4, 8):
        return _integers(words, num_bits)
    cells = words.contiguous().view(torch.uint8).view(len(words), -1, num_bits)
    together = torch.zeros(cells.shape[:2], dtype=torch.int64, device=words.device)
    for place in range(num_bits):
        together |= cells[..., place].long() << 8 * place
    values = torch.empty(*cells.shape[:2], 8, dtype=torch.uint8, device=words.device)
    for place in range(8):
        values[..., place] = together >> num_bits * place & (1 << num_bits) - 1
    return values.flatten(-2)


def _awq_integers(words: torch.Tensor) -> torch.Tensor:
    """[rows, n] int32 -> [rows, 8 * n] uint8."""
    places = _integers(words, 4).view(len(words), -1, 8)
    return places[..., list(_AWQ_PLACES)].flatten(-2)


def _unsigned(values: torch.Tensor) -> torch.Tensor:
    """int8 -> uint8, greater by 128."""
    return values.view(torch.uint8) ^ 128
