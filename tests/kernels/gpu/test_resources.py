"""The order of matrix products and exponentials is read from PTX."""

import pytest

from kernels.gpu.resources import count_exposed_exponentials

SCORES = ["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;"]
VALUES = ["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f2}, {%r1}, %rd3;"]
WAIT = ["wgmma.wait_group.sync.aligned 0;"]
SOFTMAX = ["ex2.approx.ftz.f32 %f3, %f1;"] * 3


def loop(*parts):
    return "\n".join(["$L__BB0_7:", *(f"\t{line}" for part in parts for line in part), "\t@%p1 bra \t$L__BB0_7;"])


@pytest.mark.parametrize(
    ("parts", "num_exposed"),
    [
        ((SCORES, WAIT, SOFTMAX, VALUES), 3),
        ((SCORES, WAIT, VALUES, SOFTMAX), 0),
        ((SCORES, WAIT, VALUES, SOFTMAX, WAIT, SOFTMAX), 3),
        ((SCORES, ["wgmma.wait_group.sync.aligned 1;"], SOFTMAX), 0),
        ((SOFTMAX,), 0),
    ],
    ids=["serial", "overlapped", "partly", "one product in flight", "no products"],
)
def test_exponentials_without_a_product_in_flight_are_counted(parts, num_exposed):
    assert count_exposed_exponentials(loop(*parts)) == num_exposed


def test_exponentials_outside_of_loops_are_not_counted():
    assert count_exposed_exponentials("\n".join([*SCORES, *WAIT, *SOFTMAX, loop(VALUES)])) == 0
