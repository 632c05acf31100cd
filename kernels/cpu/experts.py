"""A mixture of experts (arXiv:2101.03961, section 2): each token is computed by the few experts chosen for it.

ROUTE chooses experts by the results of a router, or takes the caller's choice, and sorts the pairs of token and expert
by expert. PACK_EXPERT_ROWS and EXPERT_LINEAR are the instructions of linear layers, PACK_ROWS and LINEAR, for a table
of experts: each is run on the rows of its expert. COMBINE adds up what the experts of a token have computed. The bits
of a token do not depend on the others: products are those of `kernels.cpu.linear`, and experts are added in the order
of their numbers, or of the caller's choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kernels.cpu.instruction import (
    FIRST_OPERAND,
    ROWS,
    SCRATCH_BYTES,
    SHARES,
    WIDTH,
    Opcode,
    first_row,
    item_code,
    item_kernel,
    num_rows,
)
from kernels.cpu.intrinsics import call_item, floats_at, longs_at
from kernels.cpu.jit import exp_nonpositive, inline, kernel, spliced
from kernels.cpu.linear import (
    X_ROWS,
    X_STEP,
    X,
    linear_item,
    linear_operands,
    move_rows,
    num_linear_items_of,
    num_pack_items_of,
    pack_item,
    set_row_operands,
)
from kernels.cpu.packed_linear import PackedLinear, pack_linear
from kernels.cpu.pointwise import check_rows
from kernels.cpu.recording import Recording
from kernels.interface import ExpertChoice, Routing

if TYPE_CHECKING:
    from kernels.cpu.arrays import Longs

_EXPERTS, _TOP_K, _WEIGHTS, _CHOSEN, _PLACES, _TOKENS, _STARTS, _NEXT, _COUNT = range(FIRST_OPERAND, FIRST_OPERAND + 9)
_LOGITS, _NORMALIZES = range(FIRST_OPERAND + 9, FIRST_OPERAND + 11)  # of ROUTE by a router; 0: by the caller
_GIVEN_EXPERTS, _GIVEN_WEIGHTS = range(FIRST_OPERAND + 11, FIRST_OPERAND + 13)
_TABLE, _TABLE_SIZE, _TABLE_STARTS, _TABLE_TOKENS, _CODE = range(FIRST_OPERAND, FIRST_OPERAND + 5)
_Y, _OUT, _N, _Y_WEIGHTS, _Y_PLACES, _Y_TOP_K = range(FIRST_OPERAND, FIRST_OPERAND + 6)

_NumItemsOf = Callable[["Longs", int], int]

_OWN = SCRATCH_BYTES - 8 * (WIDTH + 1)
"""Where the scratch memory of a thread holds the instruction of an expert, and behind it its number of rows."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights of a mixture.

    Attributes:
        router: [num_experts, hidden], never quantised: a small error may choose another expert. None: the caller
            chooses.
        gate_up, down: the layers of the experts.
        routing: how experts are chosen.
    """

    router: PackedLinear | None
    gate_up: "ExpertLayers"
    down: "ExpertLayers"
    routing: Routing


class ExpertLayers(NamedTuple):
    """A linear layer of all experts.

    Attributes:
        layers: one for each expert, of the same shape and format.
        table: [experts, WIDTH] int64, their instructions without what depends on rows: a mixture outside of a recorded
            step would spend longer on 256 of them than on its products.
    """

    layers: tuple[PackedLinear, ...]
    table: "Longs"


class Routed(NamedTuple):
    """The pairs of token and expert of a step, T * top_k, sorted by expert and then by token: its rows.

    Attributes:
        weights: [T, top_k] fp32, factor of each expert of a token, in the order in which they are added.
        places: [T, top_k] int64, row of each of these pairs.
        tokens: [T * top_k] int64, token of each row.
        starts: [num_experts + 1] int64, first row of each expert.
    """

    weights: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor


def pack_experts(
    router: torch.Tensor | None,
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    routing: Routing,
    router_bias: torch.Tensor | None = None,
) -> PackedExperts:
    """Packs the router [num_experts, hidden] and its bias, if any, and collects the packed layers of the experts.

    Raises: ValueError: the numbers of experts differ, their layers have different shapes or formats, or top_k is not
        between 1 and their number.
    """
    num_experts = len(gate_up) if router is None else len(router)
    if not num_experts == len(gate_up) == len(down):
        rows = "" if router is None else f"the router has {num_experts} rows, "
        raise ValueError(f"{rows}there are {len(gate_up)} and {len(down)} layers")
    if not 1 <= routing.top_k <= num_experts:
        raise ValueError(f"top_k is {routing.top_k}, there are {num_experts} experts")
    for layers in (gate_up, down):
        forms = {
            (layer.in_features, layer.out_features, layer.kind, layer.group_size, layer.num_bits) for layer in layers
        }
        if len(forms) > 1:
            raise ValueError(f"layers of experts differ: {sorted(forms)}")
    packed_router = None if router is None else pack_linear(router, router_bias, quantize=False)
    return PackedExperts(packed_router, _with_table(gate_up), _with_table(down), routing)


def _with_table(layers: Sequence[PackedLinear]) -> ExpertLayers:
    table, nothing = np.zeros((len(layers), WIDTH), dtype=np.int64), torch.empty(0, 0)
    for row, layer in zip(table, layers, strict=True):
        operands = linear_operands(nothing, layer, nothing, nothing, nothing)
        row[FIRST_OPERAND : FIRST_OPERAND + len(operands)] = operands
    return ExpertLayers(tuple(layers), table)


def emit_route(recording: Recording, logits: torch.Tensor, routing: Routing) -> Routed:
    """Emits the choice of experts by the logits [T, num_experts] of the router.

    Raises: ValueError: logits are not contiguous fp32.
    """
    check_rows(logits=logits)
    return _emit_route(recording, logits, logits.shape[1], routing.top_k, logits.data_ptr(), int(routing.normalizes))


def emit_choice(recording: Recording, x: torch.Tensor, choice: ExpertChoice, experts: PackedExperts) -> Routed:
    """Emits the caller's choice of experts for the rows x [T, in].

    The choice is read when the program runs. A number that is not of an expert becomes the first expert, with a weight
    of NaN, so that nothing outside of the experts' memory is read.

    Raises: ValueError: the choice is not of these rows, or not of top_k experts each.
    """
    top_k = experts.routing.top_k
    choice.check(x, top_k)
    recording.keep(choice)
    given = choice.experts.data_ptr(), choice.weights.data_ptr()
    return _emit_route(recording, x, len(experts.gate_up.layers), top_k, 0, 0, *given)


def _emit_route(recording: Recording, rows: torch.Tensor, num_experts: int, top_k: int, *source: int) -> Routed:
    """Emits ROUTE for these rows; source: its operands from `_LOGITS` on."""
    num_tokens = rows.shape[0]
    num_rows = num_tokens * top_k
    weights = recording.empty(rows, top_k)
    chosen, places, tokens = (torch.zeros(num_rows, dtype=torch.int64) for _ in range(3))
    starts, following = (torch.zeros(num_experts + 1, dtype=torch.int64) for _ in range(2))
    count = torch.zeros(1, dtype=torch.int64)
    recording.add_input(tokens, count)
    recording.keep((chosen, places, starts, following))
    recording.emit(
        Opcode.ROUTE,
        rows,
        num_experts,
        top_k,
        *(tensor.data_ptr() for tensor in (weights, chosen, places, tokens, starts, following, count)),
        *source,
    )
    return Routed(weights, places.view(num_tokens, top_k), tokens, starts)


def emit_expert_linear(
    recording: Recording, x: torch.Tensor, experts: ExpertLayers, routed: Routed, *, is_of_tokens: bool
) -> torch.Tensor:
    """Emits the linear layers of all experts -> [rows, out].

    Args:
        recording: the program.
        x: inputs, [T, in] of tokens or [rows, in].
        experts: their layers.
        routed: which rows an expert has.
        is_of_tokens: whether x has a row for each token.
    Raises: ValueError: x is not contiguous fp32, or of another width.
    """
    check_rows(x=x)
    first = experts.layers[0]
    if x.shape[1] != first.in_features:
        raise ValueError(f"x has shape {list(x.shape)}; the layers take {first.in_features}")
    tokens = routed.tokens
    packed, row_scales = recording.empty(tokens, first.depth), recording.empty(tokens, first.num_row_factors)
    out = recording.empty(tokens, first.out_features)
    table = experts.table.copy()
    set_row_operands(table, x, packed, row_scales, out)
    table[:, SHARES] = max(
        1, recording.num_shares // routed.weights.shape[1]
    )  # a token needs the items of top_k experts
    where = tokens.data_ptr() if is_of_tokens else 0
    for opcode, item in ((Opcode.PACK_EXPERT_ROWS, pack_item), (Opcode.EXPERT_LINEAR, linear_item)):
        operands = table.ctypes.data, len(table), routed.starts.data_ptr(), where, item_code(item)
        recording.emit(opcode, tokens, *operands)
    recording.keep((table, experts))
    return out


def emit_combine(recording: Recording, y: torch.Tensor, routed: Routed) -> torch.Tensor:
    """Emits the weighted sum [T, n] of the rows y [T * top_k, n] of each token.

    Raises: ValueError: y is not contiguous fp32.
    """
    check_rows(y=y)
    out = recording.empty(routed.weights, y.shape[1])
    recording.emit(
        Opcode.COMBINE,
        routed.weights,
        y.data_ptr(),
        out.data_ptr(),
        y.shape[1],
        routed.weights.data_ptr(),
        routed.places.data_ptr(),
        routed.weights.shape[1],
    )
    return out


@item_kernel
def route_item(row: "Longs", _value: np.float32, _item: int, _scratch: int) -> None:
    """Chooses the experts of all tokens or takes the given ones, and sorts the pairs: counts them, then places each."""
    num_tokens, num_experts, top_k = num_rows(row[ROWS]), row[_EXPERTS], row[_TOP_K]
    starts, following = longs_at(row[_STARTS], num_experts + 1), longs_at(row[_NEXT], num_experts)
    chosen, places = (longs_at(row[_CHOSEN], (num_tokens, top_k)), longs_at(row[_PLACES], (num_tokens, top_k)))
    weights, tokens = floats_at(row[_WEIGHTS], (num_tokens, top_k)), longs_at(row[_TOKENS], num_tokens * top_k)
    starts[:] = 0
    for t in range(num_tokens):
        if row[_LOGITS]:
            logits = floats_at(row[_LOGITS] + 4 * num_experts * t, num_experts)
            _choose(logits, chosen[t])
            _weigh(logits, chosen[t], row[_NORMALIZES], weights[t])
        else:
            given = longs_at(row[_GIVEN_EXPERTS] + 8 * top_k * t, top_k)
            _take(given, floats_at(row[_GIVEN_WEIGHTS] + 4 * top_k * t, top_k), num_experts, chosen[t], weights[t])
        for i in range(top_k):
            starts[chosen[t, i] + 1] += 1
    for expert in range(num_experts):
        starts[expert + 1] += starts[expert]
        following[expert] = starts[expert]
    for t in range(num_tokens):
        for i in range(top_k):
            place = following[chosen[t, i]]
            following[chosen[t, i]] = place + 1
            places[t, i], tokens[place] = place, t
    longs_at(row[_COUNT], 1)[0] = num_tokens * top_k


@kernel
def _choose(logits: "np.ndarray[tuple[int], np.dtype[np.float32]]", chosen: "Longs") -> None:
    """Writes the numbers of the largest logits in increasing order; of equal ones the first. All may be NaN."""
    top_k = chosen.shape[0]
    for expert in range(logits.shape[0]):
        place = min(expert, top_k)
        while place > 0 and logits[expert] > logits[chosen[place - 1]]:
            place -= 1
            if place + 1 < top_k:
                chosen[place + 1] = chosen[place]
        if place < top_k:
            chosen[place] = expert
    for i in range(1, top_k):  # by number
        expert, place = chosen[i], i
        while place > 0 and chosen[place - 1] > expert:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = expert


@kernel
def _weigh(
    logits: "np.ndarray[tuple[int], np.dtype[np.float32]]",
    chosen: "Longs",
    normalizes: int,
    weights: "np.ndarray[tuple[int], np.dtype[np.float32]]",
) -> None:
    """Writes the softmax of the logits at those chosen: of these logits alone, or of all."""
    largest = logits[0]
    for expert in range(logits.shape[0]):
        largest = max(largest, logits[expert])
    total = np.float32(0)
    for expert in range(0 if normalizes else logits.shape[0]):
        total += exp_nonpositive(logits[expert] - largest)
    for i in range(chosen.shape[0]):
        weights[i] = exp_nonpositive(logits[chosen[i]] - largest)
        if normalizes:
            total += weights[i]
    for i in range(chosen.shape[0]):
        weights[i] /= total


@kernel
def _take(
    given: "Longs",
    factors: "np.ndarray[tuple[int], np.dtype[np.float32]]",
    num_experts: int,
    chosen: "Longs",
    weights: "np.ndarray[tuple[int], np.dtype[np.float32]]",
) -> None:
    """Copies the given experts of a token; those that do not exist become the first one, with a weight of NaN."""
    for i in range(chosen.shape[0]):
        is_expert = 0 <= given[i] < num_experts
        chosen[i] = given[i] if is_expert else 0
        weights[i] = factors[i] if is_expert else np.float32(np.nan)


@kernel
def num_expert_pack_items(row: "Longs") -> int:
    """Returns the items of PACK_EXPERT_ROWS: those of all experts."""
    return _num_items_of_all(row, num_pack_items_of)


@item_kernel
def expert_pack_item(row: "Longs", value: np.float32, item: int, scratch: int) -> None:
    """Runs an item of the instruction PACK_ROWS of an expert."""
    _run_item_of_one(row, num_pack_items_of, value, item, scratch)


@kernel
def num_expert_linear_items(row: "Longs") -> int:
    """Returns the items of EXPERT_LINEAR: those of all experts."""
    return _num_items_of_all(row, num_linear_items_of)


@item_kernel
def expert_linear_item(row: "Longs", value: np.float32, item: int, scratch: int) -> None:
    """Runs an item of the instruction LINEAR of an expert."""
    _run_item_of_one(row, num_linear_items_of, value, item, scratch)


@spliced
def _num_items_of_all(row: "Longs", num_items_of: _NumItemsOf) -> int:
    """Returns the sum over the experts; num_items_of counts the items of an expert's instruction on its rows."""
    table, starts = _table(row), longs_at(row[_TABLE_STARTS], row[_TABLE_SIZE] + 1)
    total = 0
    for expert in range(row[_TABLE_SIZE]):
        rows = starts[expert + 1] - starts[expert]
        if rows:
            total += num_items_of(table[expert], rows)
    return total


@spliced
def _run_item_of_one(row: "Longs", num_items_of: _NumItemsOf, value: np.float32, item: int, scratch: int) -> None:
    """Finds the expert that an item is of, and calls the kernel at `_CODE` for its own instruction."""
    table, starts = _table(row), longs_at(row[_TABLE_STARTS], row[_TABLE_SIZE] + 1)
    for expert in range(row[_TABLE_SIZE]):
        rows = starts[expert + 1] - starts[expert]
        num_items = num_items_of(table[expert], rows) if rows else 0
        if item < num_items:
            own = _own_instruction(row, table[expert], starts[expert], rows, scratch)
            call_item(row[_CODE], own, value, item, scratch)
            return
        item -= num_items


@inline
def _table(row: "Longs") -> "Longs":
    table: Longs = longs_at(row[_TABLE], (row[_TABLE_SIZE], WIDTH))
    return table


@inline
def _own_instruction(row: "Longs", template: "Longs", begin: int, rows: int, scratch: int) -> int:
    """Makes the instruction of an expert, on its rows, in the memory of this thread; returns its address."""
    own: Longs = longs_at(scratch + _OWN, WIDTH)
    own[:] = template
    longs_at(scratch + _OWN + 8 * WIDTH, 1)[0] = rows
    move_rows(own, scratch + _OWN + 8 * WIDTH, begin)
    if not row[_TABLE_TOKENS]:
        own[X] += begin * own[X_STEP]
    elif rows == 1:  # may be multiplied where it is
        own[X] += longs_at(row[_TABLE_TOKENS], begin + 1)[begin] * own[X_STEP]
    else:
        own[X_ROWS] = row[_TABLE_TOKENS] + 8 * begin
    return scratch + _OWN


@item_kernel
def combine_item(row: "Longs", _value: np.float32, item: int, _scratch: int) -> None:
    """Adds up the rows of some tokens."""
    n, top_k = row[_N], row[_Y_TOP_K]
    begin, end = first_row(item, row), first_row(item + 1, row)
    weights, places = floats_at(row[_Y_WEIGHTS], (end, top_k)), longs_at(row[_Y_PLACES], (end, top_k))
    for t in range(begin, end):
        out = floats_at(row[_OUT] + 4 * n * t, n)
        out[:] = np.float32(0)
        for i in range(top_k):
            y, weight = floats_at(row[_Y] + 4 * n * places[t, i], n), weights[t, i]
            for j in range(n):
                out[j] += weight * y[j]
