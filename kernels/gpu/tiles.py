"""Table of tile sizes by target and shape class, with the reason for each.

Those of heads of 128 and of 8-bit products on sm_90 were measured on an H200 (docs/performance.md). The others follow
from the hardware (registers, shared memory, the smallest matrix instruction) and from published figures. The compile
check shows that they fit; it lists the few that spill.
"""

from functools import cache
from typing import NamedTuple

from kernels.gpu.targets import Target, UnsupportedTargetError

# Attention


class AttentionTile(NamedTuple):
    """Tile of a program of an attention kernel.

    Attributes:
        block_m: rows of queries: query tokens of one KV head times the query heads that share it.
        block_n: keys per step.
        num_warps, num_stages: of the launch; with s stages, the loads of up to s - 1 steps are in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_Shape = tuple[int, int]  # (head size rounded up to 64, 128, 256 or 512; bits of a KV value)
_SHAPES = [(head_dim, bits) for head_dim in (64, 128, 256, 512) for bits in (16, 8)]

_PREFILL_TILES: dict[str, dict[_Shape, AttentionTile]] = {
    # Turing: Triton does not use its tensor cores but scalar multiply-adds, which spill registers with larger tiles.
    "sm_75": {**dict.fromkeys(_SHAPES, AttentionTile(16, 16, 4, 1)), (512, 16): AttentionTile(16, 16, 8, 1)},
    # Hopper and Blackwell: 128 rows are two 64-row matrix instructions side by side (one warp group each), and halve
    # what 64 rows would read of keys through the L2 cache, which 5 TB/s would not feed. 64 keys keep scores,
    # probabilities and a 128 x 128 accumulator in 8 warps' registers. Three stages hide the latency of gathered blocks;
    # heads of 256 have room for two, and registers for 32 keys. Stock Triton reaches 400-490 TFLOP/s on an H100 with
    # 128 x 64 for heads of 128. An accumulator of 64 rows of 512 does not fit in the registers: on all targets heads of
    # 512 have 32 rows, which 16-row instructions multiply.
    "sm_90": {
        (64, 16): AttentionTile(128, 128, 8, 3),
        (64, 8): AttentionTile(128, 64, 8, 3),  # 128 keys, widened, take too many registers
        (128, 16): AttentionTile(128, 64, 8, 3),
        (128, 8): AttentionTile(128, 64, 8, 3),
        (256, 16): AttentionTile(128, 32, 8, 2),
        (256, 8): AttentionTile(128, 32, 8, 2),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(32, 32, 8, 2)),
    },
    # Ampere, A100: matrix instructions of 16 rows per warp, so 8 warps share 128 rows; operands pass through registers,
    # which heads of 256 exhaust beyond 64 rows of 32 keys.
    "sm_80": {
        (64, 16): AttentionTile(128, 64, 4, 3),
        (64, 8): AttentionTile(128, 64, 4, 3),
        (128, 16): AttentionTile(128, 64, 8, 3),
        (128, 8): AttentionTile(128, 64, 8, 3),
        (256, 16): AttentionTile(64, 32, 8, 2),
        (256, 8): AttentionTile(64, 32, 8, 2),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(32, 32, 8, 2)),
    },
    # The same instructions with 99 KB of shared memory: fewer keys under way, and half the rows for heads of 256.
    "sm_86": {
        (64, 16): AttentionTile(128, 64, 4, 2),
        (64, 8): AttentionTile(128, 32, 8, 2),
        (128, 16): AttentionTile(128, 32, 8, 2),
        (128, 8): AttentionTile(128, 32, 8, 2),
        (256, 16): AttentionTile(64, 32, 8, 2),
        (256, 8): AttentionTile(64, 32, 8, 2),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(32, 16, 8, 2)),
    },
    # CDNA 3: 64 KB for everything. Its pipeliner keeps the next tile in registers and one in shared memory, so a tile
    # of keys and one of values must fit beside the probabilities; four waves of 64 lanes share 128 rows.
    "gfx942": {
        (64, 16): AttentionTile(128, 64, 4, 2),
        (64, 8): AttentionTile(128, 64, 4, 2),
        (128, 16): AttentionTile(128, 64, 4, 2),
        (128, 8): AttentionTile(128, 64, 4, 2),
        (256, 16): AttentionTile(128, 16, 8, 2),
        (256, 8): AttentionTile(128, 16, 8, 2),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(32, 16, 4, 2)),
    },
    # RDNA 3: waves of 32 lanes, and half of CDNA's registers per lane.
    "gfx1100": {
        **dict.fromkeys(((64, 16), (64, 8)), AttentionTile(64, 64, 8, 2)),
        **dict.fromkeys(((128, 16), (128, 8)), AttentionTile(64, 16, 8, 2)),
        **dict.fromkeys(((256, 16), (256, 8)), AttentionTile(64, 16, 8, 2)),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(16, 16, 8, 1)),
    },
}

_DECODE_TILES: dict[str, dict[_Shape, AttentionTile]] = {
    "sm_75": {**dict.fromkeys(_SHAPES, AttentionTile(16, 16, 4, 1)), (512, 16): AttentionTile(16, 16, 8, 1)},
    # One query token is bound by memory, so what counts is bytes under way: latency times bandwidth is about 30 KB per
    # multiprocessor on an H200. 16 KB of keys and as many values per step, two steps in flight in each of two resident
    # programs, is four times that and still leaves room in shared memory. 16 rows are the smallest matrix instruction;
    # they hold all query heads of a KV head in the usual groups of 1 to 8.
    "sm_90": {
        (64, 16): AttentionTile(16, 128, 4, 3),
        (64, 8): AttentionTile(16, 128, 4, 4),
        (128, 16): AttentionTile(16, 64, 4, 3),
        (128, 8): AttentionTile(16, 128, 4, 3),
        (256, 16): AttentionTile(16, 32, 4, 3),
        (256, 8): AttentionTile(16, 32, 4, 4),  # 64 keys, widened, take too many registers
        (512, 16): AttentionTile(16, 16, 4, 3),
        (512, 8): AttentionTile(16, 16, 4, 4),
    },
    "sm_80": {
        (64, 16): AttentionTile(16, 64, 4, 3),
        (64, 8): AttentionTile(16, 128, 4, 3),
        (128, 16): AttentionTile(16, 64, 4, 3),
        (128, 8): AttentionTile(16, 64, 4, 3),
        (256, 16): AttentionTile(16, 32, 4, 3),
        (256, 8): AttentionTile(16, 32, 4, 3),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(16, 16, 4, 3)),
    },
    # 99 KB and about a quarter of the bandwidth: half of the bytes under way.
    "sm_86": {
        (64, 16): AttentionTile(16, 64, 4, 3),
        (64, 8): AttentionTile(16, 64, 4, 3),
        (128, 16): AttentionTile(16, 32, 4, 3),
        (128, 8): AttentionTile(16, 64, 4, 3),
        (256, 16): AttentionTile(16, 16, 4, 3),
        (256, 8): AttentionTile(16, 32, 4, 3),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(16, 16, 4, 2)),
    },
    # 64 KB: two programs per compute unit want at most 32 KB each.
    "gfx942": {
        (64, 16): AttentionTile(16, 64, 4, 2),
        (64, 8): AttentionTile(16, 64, 4, 2),
        (128, 16): AttentionTile(16, 32, 4, 2),
        (128, 8): AttentionTile(16, 32, 4, 2),
        (256, 16): AttentionTile(16, 16, 4, 2),
        (256, 8): AttentionTile(16, 16, 4, 2),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(16, 16, 4, 2)),
    },
    "gfx1100": {
        **dict.fromkeys(((64, 16), (64, 8)), AttentionTile(16, 64, 4, 2)),
        **dict.fromkeys(((128, 16), (128, 8)), AttentionTile(16, 32, 4, 2)),
        **dict.fromkeys(((256, 16), (256, 8)), AttentionTile(16, 16, 8, 2)),
        **dict.fromkeys(((512, 16), (512, 8)), AttentionTile(16, 16, 16, 2)),
    },
}

_TABLE_OF = {
    "sm_87": "sm_80",
    "sm_89": "sm_86",
    "sm_100": "sm_90",
    "sm_110": "sm_90",
    "sm_120": "sm_86",
    "gfx90a": "gfx942",
    "gfx950": "gfx942",
}
"""Targets that use another's table: at least as much shared memory, and instructions of the same shape or larger."""

_FLOAT32_TILE = AttentionTile(32, 32, 4, 1)
"""fp32 has no matrix instruction of full precision on NVIDIA, so tiles are small everywhere."""

_SMALLEST_TILE = AttentionTile(16, 16, 4, 1)
"""For fp32 in 64 KB, which 32 rows of queries and 32 keys of heads of 256 alone fill, and for larger heads."""

PROGRAMS_PER_PROCESSOR = 3
"""Decode programs resident on a multiprocessor. The kernel for heads of 128 in bf16 takes 71,680 of sm_90's 233,472
bytes of shared memory, which allows three, and 128 registers per thread, which allow four."""


MAX_HEAD_DIM = 512


def has_kernels(head_dim: int) -> bool:
    """Tells whether the attention kernels take heads of this size."""
    return head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM


def has_latent_kernels(target: Target) -> bool:
    """Tells whether the attention kernels take keys whose first numbers are the values: of 512 numbers and 64 more.

    sm_75, whose queries, keys and weights they would be, lacks the shared memory, and gfx1100 the registers.
    """
    return target.name not in ("sm_75", "gfx1100")


def head_tiles(value_dim: int, group_size: int) -> int:
    """Returns the number of equal tiles of the query heads of a KV head: few, whose accumulators fit in registers."""
    most = 128 if value_dim <= 128 else 16
    return next(
        number for number in range(1, group_size + 1) if group_size <= number * most and not group_size % number
    )


def rest_block(head_dim: int, value_dim: int) -> int:
    """Returns the padded number of values of a key behind those that are its latent, at least one instruction's."""
    return max(16, _power_of_2(head_dim - value_dim)) if head_dim > value_dim else 16


def prefill_tile(
    target: Target, head_dim: int, query_bits: int, kv_bits: int, group_size: int, *, batch_invariant: bool = False
) -> AttentionTile:
    """Returns the tile for rows of several query tokens.

    Args:
        target: architecture of the device.
        head_dim: size of a head's values, which decides the accumulator.
        query_bits, kv_bits: bits of a value of queries and of keys.
        group_size: query heads per KV head.
        batch_invariant: whether one masked loop takes all keys of a row, which needs more registers.
    """
    tile = _attention_tile(_PREFILL_TILES, target, head_dim, query_bits, kv_bits)
    if batch_invariant and target.backend == "cuda" and tile.block_m == 128 and tile.num_warps == 4:
        tile = tile._replace(num_warps=8)
    if batch_invariant and kv_bits == 8 and tile.block_n > 32:
        tile = tile._replace(block_n=tile.block_n // 2)
    return tile._replace(block_m=max(tile.block_m, _heads_of_tile(head_dim, group_size)))


def decode_tile(target: Target, head_dim: int, query_bits: int, kv_bits: int, group_size: int) -> AttentionTile:
    """Returns the tile for rows of one query token; arguments as in `prefill_tile`."""
    tile = _attention_tile(_DECODE_TILES, target, head_dim, query_bits, kv_bits)
    return tile._replace(block_m=max(16, _heads_of_tile(head_dim, group_size)))


def _attention_tile(
    table: dict[str, dict[_Shape, AttentionTile]], target: Target, head_dim: int, query_bits: int, kv_bits: int
) -> AttentionTile:
    if max(query_bits, kv_bits) == 32:
        return _SMALLEST_TILE if target.name == "sm_75" or head_dim > 256 else _FLOAT32_TILE
    return table[_TABLE_OF.get(target.name, target.name)][max(64, _power_of_2(head_dim)), kv_bits]


def _heads_of_tile(head_dim: int, group_size: int) -> int:
    return _power_of_2(group_size // head_tiles(head_dim, group_size))


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# Matrix products in Triton


class ProductTile(NamedTuple):
    """Tile of a program: block_m rows by block_n columns of the result, block_k inputs per step.

    Attributes:
        split_programs: programs of a product of few rows at which its inputs are not divided further: about one per
            multiprocessor, or two.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_programs: int = 128


_SPLIT_INPUTS = 512
"""Least inputs of a part: eight steps, so that the pipeline of loads is full most of the time."""


def product_tile(target: Target, itemsize: int) -> ProductTile:
    """Returns the tile for values of itemsize bytes; the same for any number of rows.

    In 16 bits 128 x 128 results are eight warps' registers, and a step is 32 KB: three stages, or two where shared
    memory has 64 KB. fp32 has no matrix instruction of full precision, and Triton uses none on sm_75.
    """
    if target.name == "sm_75":
        return ProductTile(32, 32, 32, 4, 1)
    if itemsize == 4:
        return ProductTile(64, 64, 32, 4, 1)
    return ProductTile(128, 128, 64, 8, min(3, target.max_shared_bytes // 32768))


def block_product_tiles(target: Target, itemsize: int) -> tuple[ProductTile, ...]:
    """Returns tiles for 8-bit weights with scales per block, by rising block_m, the most rows that use a tile.

    Few rows are bound by reading weights: more programs and more loads in flight count, as in decode attention, and 16
    rows are the smallest matrix instruction. Two accumulators (of the product and of the sum) of 128 x 128 results are
    128 of a thread's registers in eight warps. `--batch-invariant` uses the tile in the middle for any number of rows,
    because sums of parts take a third one. A step takes 128 bytes of a row of inputs, which a scale covers.

    Args:
        target: architecture of the device.
        itemsize: bytes of a value of the inputs: 1 where the target multiplies in 8 bits.
    """
    if target.name == "sm_75":
        return (ProductTile(32, 32, 32, 4, 1),)
    if itemsize == 4:
        return (ProductTile(64, 64, 32, 4, 1),)
    block_k = 128 // itemsize

    def tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> ProductTile:
        num_stages = min(num_stages, target.max_shared_bytes // (block_m * 128 + block_n * block_k))
        return ProductTile(block_m, block_n, block_k, num_warps, num_stages)

    if target.backend == "hip":  # its pipeliner keeps one step in registers
        return tile(16, 64, 4, 2), tile(64, 64, 4, 2), tile(128, 128, 8, 2)
    return tile(16, 64, 4, 6), tile(64, 64, 4, 4), tile(128, 128, 8, 3)


def scaled_product_tiles(target: Target) -> tuple[ProductTile, ...]:
    """Returns tiles for 8-bit rows and weights with scales per row and output channel, by rising block_m.

    They are for as many rows as the last of them has; more, and all rows on other targets, are multiplied by the
    vendor's library. Measured on an H200 with the layers of Llama-3.1-8B: for up to 128 rows the library (cuBLAS 13.0)
    takes tiles of 128 x 128 that it does not split: in layers of 4,096 outputs 32 of 132 multiprocessors have work, and
    these tiles are 1.1 to 1.9 times as fast; with 256 rows both take the same time.
    """
    if target.name != "sm_90":
        return ()
    return (
        ProductTile(16, 64, 128, 4, 6, split_programs=256),
        ProductTile(64, 64, 256, 4, 3, split_programs=256),
        ProductTile(128, 128, 128, 8, 3),
    )


@cache
def max_scaled_rows(target: Target) -> int:
    """Returns the most rows for which there are `scaled_product_tiles`; 0: there are none."""
    return max((tile.block_m for tile in scaled_product_tiles(target)), default=0)


def grouped_product_tiles(target: Target, itemsize: int, inputs_per_step: int, span: int) -> tuple[ProductTile, ...]:
    """Returns tiles for integers in groups, by rising block_m; see `block_product_tiles`.

    A thread holds its inputs too, for their sums: 128 x 64 results in eight warps leave room for them.

    Args:
        target: architecture of the device.
        itemsize: bytes of a value of the inputs.
        inputs_per_step: inputs of a step.
        span: bytes of a row of weights that a step loads.
    """
    if target.name == "sm_75":
        return (ProductTile(32, 32, inputs_per_step, 4, 1),)
    if itemsize == 4:
        return (ProductTile(32, 64, inputs_per_step, 4, 1),)

    def tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> ProductTile:
        step_bytes = block_m * inputs_per_step * itemsize + block_n * span
        widened_bytes = block_n * span * itemsize  # where the matrix instruction takes both operands from shared memory
        num_stages = max(1, min(num_stages, (target.max_shared_bytes - widened_bytes) // step_bytes))
        return ProductTile(block_m, block_n, inputs_per_step, num_warps, num_stages)

    stages = (2, 2, 2) if target.backend == "hip" else (5, 4, 3)
    return tile(16, 64, 4, stages[0]), tile(64, 64, 4, stages[1]), tile(128, 64, 8, stages[2])


def product_splits(tile: ProductTile, num_in: int, num_out: int) -> int:
    """Returns the number of parts into which the inputs of a layer are divided; it follows from the weights alone."""
    num_column_tiles = -(-num_out // tile.block_n)
    return max(1, min(tile.split_programs // num_column_tiles, num_in // _SPLIT_INPUTS))


class AdapterTile(NamedTuple):
    """Tile of a program of the products of adapters: block_m tokens.

    Attributes:
        block_k: inputs per step of A x.
        max_block_rank: most columns of A x, and terms per step of B (A x).
        block_n: columns of B (A x); the same for all tiles of a target.
    """

    block_m: int
    block_k: int
    max_block_rank: int
    block_n: int
    num_warps: int
    num_stages: int


def adapter_tiles(target: Target, itemsize: int) -> tuple[AdapterTile, ...]:
    """Returns tiles for adapters by rising block_m, the most tokens of an adapter that use a tile.

    Few tokens are bound by reading A and B, as in products by experts. `--batch-invariant` uses the first tile for any
    number of tokens.

    Args:
        target: architecture of the device.
        itemsize: bytes of a value.
    """
    if target.name == "sm_75" or itemsize == 4:
        return (AdapterTile(16, 32, 32, 32, 4, 1),)
    num_stages = 2 if target.backend == "hip" else 3
    return AdapterTile(16, 128, 64, 64, 4, num_stages), AdapterTile(64, 64, 64, 64, 8, num_stages)


# Rows of activations

MAX_ROW_BYTES = 64 * 1024
"""Largest row that a kernel keeps in registers: 128 bytes for each of 512 threads, which have 512 bytes."""


class RowTile(NamedTuple):
    """Tile of a program of a row kernel: block_m rows by block_n columns."""

    block_m: int
    block_n: int
    num_warps: int


def row_tile(n: int, itemsize: int) -> RowTile:
    """Returns the tile for kernels that reduce whole rows of n values of itemsize bytes.

    16 values per thread: in bf16 two loads of 16 bytes from each input, enough loads in flight for a single row on a
    multiprocessor, and few enough threads for a short reduction. Short rows share a program until it has two warps,
    because a multiprocessor takes 32 programs and 64 warps.

    Raises: UnsupportedTargetError: the row has more than MAX_ROW_BYTES.
    """
    if n * itemsize > MAX_ROW_BYTES:
        raise UnsupportedTargetError(
            f"rows have {n} values of {itemsize} bytes, GPU operations on whole rows take up to {MAX_ROW_BYTES} bytes: "
            "use --kernels torch"
        )
    block_n = _power_of_2(n)
    block_m = max(1, 1024 // block_n)
    return RowTile(block_m, block_n, num_warps=min(16, block_m * block_n // 512))


def column_tile(n: int) -> RowTile:
    """Returns the tile for elementwise kernels on rows of n values; rows are divided, so that few rows fill the GPU.

    16 values per thread as for whole rows, with 4 warps; short rows share a program.
    """
    block_n = min(2048, _power_of_2(n))
    return RowTile(2048 // block_n, block_n, num_warps=4)


class HeadTile(NamedTuple):
    """Tile of a program of a kernel on heads: block_h heads of a token by block_d pairs of dimensions."""

    block_h: int
    block_d: int
    num_warps: int


def head_tile(num_heads: int, head_dim: int, warp_size: int) -> HeadTile:
    """Returns the tile for the rotation of heads.

    512 pairs: 64 threads with one load of 16 bytes (bf16) for each half of 8 pairs. A decode step of few tokens is then
    spread over several multiprocessors, and 32 programs of two warps fill one in a prefill.
    """
    block_d = _power_of_2(head_dim // 2)
    block_h = min(max(1, 512 // block_d), _power_of_2(num_heads))
    return HeadTile(block_h, block_d, num_warps=max(1, block_h * block_d // 8 // warp_size))
