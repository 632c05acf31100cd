"""One token of the gated delta rule for 16 or 32 columns of a head, written in LLVM's vector instructions.

The columns of a state do not depend on each other: 32 columns of 128 rows fill half of a first-level cache, where they
stay for all tokens of a prompt. Sums over rows are those of every fourth row, added up at the end in a fixed order.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.tile import FLOATS, LANES, broadcast, emit_fma, load

UNROLLED = 4
"""Rows of a state per iteration, with a sum each, so that no addition waits for the one before it."""

NUM_VECTORS = 2 if cpu_features().avx512 else 1
"""Vectors of `LANES` columns per call; their `UNROLLED` sums each are in registers."""

_I64, _F32 = ir.IntType(64), ir.FloatType()


def _over_rows(
    builder: Any, depth: Any, body: Callable[[Any, Sequence[Any]], Sequence[Any]], num_vectors: int
) -> list[Any]:
    """Emits a loop over `depth` rows, `UNROLLED` at a time, that carries sums; returns their total by vector.

    `body` gets the first row and its sums, those of the same vector side by side.
    """
    before = builder.block
    loop, after = builder.append_basic_block("rows"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    row = builder.phi(_I64)
    row.add_incoming(_I64(0), before)
    sums = [builder.phi(FLOATS) for _ in range(num_vectors * UNROLLED)]
    for total in sums:
        total.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
    added = body(row, sums)
    end = builder.block
    following = builder.add(row, _I64(UNROLLED))
    row.add_incoming(following, end)
    for total, value in zip(sums, added, strict=True):
        total.add_incoming(value, end)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    builder.position_at_end(after)
    totals = []
    for vector in range(num_vectors):
        a, b, c, d = added[UNROLLED * vector : UNROLLED * (vector + 1)]
        totals.append(builder.fadd(builder.fadd(a, b), builder.fadd(c, d)))
    return totals


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, FLOATS.as_pointer())).align = 4


def _step(num_vectors: int) -> Any:
    """Returns `delta_step` for as many vectors of columns."""

    def _delta_step(
        _typing_context: Any, _state: Any, _step: Any, _depth: Any, _key: Any, _query: Any, _value: Any, _out: Any,
        _kept: Any, _beta: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            state, step, depth, key, query, value, out, kept, beta = args
            offsets = [_I64(4 * LANES * vector) for vector in range(num_vectors)]
            factor = broadcast(builder, kept)

            def places(row: Any) -> list[list[Any]]:
                """Addresses in the state, of `UNROLLED` rows by vector."""
                rows = [builder.add(row, _I64(i)) for i in range(UNROLLED)]
                starts = [builder.add(state, builder.mul(step, one)) for one in rows]
                return [[builder.add(start, offset) for start in starts] for offset in offsets]

            def scalars(base: Any, row: Any) -> list[Any]:
                first = builder.add(base, builder.mul(row, _I64(4)))
                return [
                    broadcast(builder, load(builder, builder.add(first, _I64(4 * i)), _F32, 4)) for i in range(UNROLLED)
                ]

            def read(row: Any, sums: Sequence[Any]) -> list[Any]:
                keys = scalars(key, row)
                stored = [load(builder, place, FLOATS, 4) for places_of in places(row) for place in places_of]
                return [emit_fma(builder, s, keys[i % UNROLLED], sums[i]) for i, s in enumerate(stored)]

            expected = _over_rows(builder, depth, read, num_vectors)
            changes = []
            for offset, found in zip(offsets, expected, strict=True):
                given = load(builder, builder.add(value, offset), FLOATS, 4)
                error = builder.fsub(given, builder.fmul(factor, found))
                changes.append(builder.fmul(broadcast(builder, beta), error))

            def update(row: Any, sums: Sequence[Any]) -> list[Any]:
                keys, queries = scalars(key, row), scalars(query, row)
                added = []
                for vector, places_of in enumerate(places(row)):
                    for i, place in enumerate(places_of):
                        kept_part = builder.fmul(factor, load(builder, place, FLOATS, 4))
                        new = emit_fma(builder, keys[i], changes[vector], kept_part)
                        _store(builder, new, place)
                        added.append(emit_fma(builder, new, queries[i], sums[UNROLLED * vector + i]))
                return added

            for offset, result in zip(offsets, _over_rows(builder, depth, update, num_vectors), strict=True):
                _store(builder, result, builder.add(out, offset))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, types.float32, types.float32), codegen

    return intrinsic(_delta_step)


delta_step: Any = _step(NUM_VECTORS)
"""delta_step(state, step, depth, key, query, value, out, kept, beta): S = kept S + key (beta (value - kept S^T key))^T
and out = S^T query, of `NUM_VECTORS * LANES` columns.

The first seven are addresses, but for step, the bytes between rows of the state, and depth, their number, a multiple of
`UNROLLED`. The others are fp32."""

delta_step_of_one: Any = _step(1)
"""The same of `LANES` columns."""
