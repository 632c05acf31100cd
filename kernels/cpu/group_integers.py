"""How integers of 4, 5, 6 or 8 bits lie in panels of weights, and how the kernels read them.

A column has its integers in words of 32 bits. With 8 bits these are four inputs each. With fewer bits there are two
planes: first words of the low four bits of eight inputs, two in a byte, the even one in the low half; then words of the
bits above these. Byte j of such a word has them for byte j of four words before it (5 bits) or two (6 bits): in each
half those of one half, the first word's lowest.
"""

from typing import TYPE_CHECKING, Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.jit import inline
from kernels.cpu.tile import INTS, LANES, Planes, broadcast, load

if TYPE_CHECKING:
    from kernels.cpu.arrays import Bytes

_I32 = ir.IntType(32)


def stored_bits(num_bits: int, num_in: int) -> int:
    """Returns the bits in which integers of rows [num_in] are stored: as many as they have, or more to fill words."""
    return next(bits for bits in (4, 5, 6, 8) if bits >= num_bits and num_in * (bits - 4) % 32 == 0)


def pack_integers(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Returns the words of rows of integers [rows, in] uint8: [rows, in * num_bits / 32, 4] bytes."""
    if num_bits == 8:
        return values.view(len(values), -1, 4)
    low = values & 15
    nibbles = (low[:, ::2] | low[:, 1::2] << 4).view(len(values), -1, 4)
    if num_bits == 4:
        return nibbles
    num_high = num_bits - 4
    high = (values >> 4).view(len(values), -1, 4 // num_high, 4, 2)  # [rows, words above, words, bytes, halves]
    shifts = torch.tensor([[word * num_high + 4 * half for half in (0, 1)] for word in range(4 // num_high)])
    above = (high << shifts.to(torch.uint8)[:, None]).sum(dim=(2, 4), dtype=torch.uint8)
    return torch.cat((nibbles, above), dim=1)


@inline
def integer_at(cells: "Bytes", num_bits: int, num_in: int, lane: int, index: int) -> int:
    """Returns the integer of an input in a column, the lane of a panel with these bytes."""
    if num_bits == 8:
        return int(cells[(index // 4 * LANES + lane) * 4 + index % 4] & 255)
    word, byte, half = index // 8, index % 8 // 2, index % 2
    value = cells[(word * LANES + lane) * 4 + byte] >> 4 * half & 15
    if num_bits > 4:
        place = word * (num_bits - 4)
        above = cells[((num_in // 8 + place // 4) * LANES + lane) * 4 + byte] >> place % 4 + 4 * half
        value |= (above & (1 << num_bits - 4) - 1) << 4
    return int(value)


def emit_word(builder: Any, address: Any) -> Any:
    """Emits a load of a word of each column of a panel."""
    return load(builder, address, INTS, 4)


def emit_halves(builder: Any, address: Any, planes: Planes | None) -> tuple[Any, Any]:
    """Emits the eight integers of a word: four bytes of those at even places, and four of the others.

    Args:
        builder: LLVM's.
        address: of the low four bits.
        planes: where the bits above are; None: there are none.
    """
    word = emit_word(builder, address)
    even, odd = builder.and_(word, of_bytes(15)), builder.and_(builder.lshr(word, of_ints(4)), of_bytes(15))
    if planes is None:
        return even, odd
    above = emit_word(builder, builder.add(address, planes.offset))
    above = builder.lshr(above, broadcast(builder, builder.trunc(planes.shift, _I32)))
    ones = builder.sub(builder.shl(_I32(1), builder.trunc(planes.num_high, _I32)), _I32(1))
    mask = broadcast(builder, builder.mul(ones, _I32(0x10101010)))
    even = builder.or_(even, builder.and_(builder.shl(above, of_ints(4)), mask))
    return even, builder.or_(odd, builder.and_(above, mask))


def of_ints(value: int) -> Any:
    """Returns a vector of equal words."""
    return ir.Constant(INTS, [value] * LANES)


def of_bytes(value: int) -> Any:
    """Returns a vector of words of equal bytes."""
    return of_ints(value * 0x01010101)
