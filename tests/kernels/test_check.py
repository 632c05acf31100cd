"""The check of kernels at start: passes for every family, and notices every operation that computes something else."""

from dataclasses import replace

import pytest
import torch

from kernels.check import find_mismatches, kernel_cases, run_cases
from kernels.cpu.cpu_features import cpu_features
from kernels.delta_heads import DeltaHeads
from kernels.families import cpu_ops, reference_ops
from kernels.gates import ClampedGate
from kernels.interface import Routing
from kernels.model_forms import ExpertForms
from kernels.reference.ops import ReferenceOps
from tests.support.kernels.model_forms import SMALL

CPU = torch.device("cpu")
LARGE = {"has_bias": True, "has_head_norms": True, "sliding_windows": (50, None), "block_size": 32}
NORMED = {"has_projection_norms": True}
CAPPED = {"attention_soft_caps": (2.0, None), "logit_soft_cap": 30.0}
EXPERTS = {"experts": ExpertForms(7, 40, Routing(3, normalizes=True, gate="silu_and_mul"))}
SHARED = {"experts": EXPERTS["experts"]._replace(has_shared=True)}
BIASED = {
    "experts": ExpertForms(7, 40, Routing(3, normalizes=True, gate=ClampedGate(1.702, 0.5)), has_bias=True),
    "has_sinks": True,
}
MICROSCALED = {
    "experts": ExpertForms(7, 96, Routing(3, normalizes=True, gate=ClampedGate(1.702, 7.0)), True, is_microscaled=True)
}
STATES = {"delta_heads": DeltaHeads(2, 16, 4, 32, 4), "has_attention_gate": True}
CHOSEN = {"experts": ExpertForms(7, 40, Routing(3, normalizes=True, gate="silu_and_mul"), has_router=False)}
TWO_BYTES = [LARGE | {"weights_dtype": dtype} for dtype in (torch.bfloat16, torch.float16)]


GROUPS = [
    {"weights_form": f"int{num_bits} groups", "weights_dtype": dtype}
    for num_bits in (4, 5, 6, 8)
    for dtype in (torch.float32, torch.bfloat16)
]
FP4 = [
    {"weights_form": f"{form} groups", "weights_dtype": dtype} | EXPERTS
    for form in ("nvfp4", "mxfp4")
    for dtype in (torch.float32, torch.bfloat16)
]


def check(ops, forms=SMALL, device=CPU):
    return find_mismatches(ops, reference_ops(device), forms, kernel_cases(forms, device))


@pytest.mark.parametrize(
    "fields",
    [
        *({}, LARGE, CAPPED, {"weights_form": "fp8 checkpoint"}, *GROUPS, *FP4),
        *(STATES, STATES | GROUPS[0], EXPERTS, SHARED, CHOSEN, BIASED, MICROSCALED, NORMED, *TWO_BYTES),
    ],
)
def test_cpu_kernels_pass(fields):
    assert not check(cpu_ops(), replace(SMALL, **fields))


@pytest.mark.parametrize("form", ["int8", *(f"int8 by int{num_bits} groups" for num_bits in (4, 5, 6, 8))])
def test_8_bit_cpu_kernels_pass(form):
    forms = replace(SMALL, weights_form=form, kv_dtype=torch.int8, hidden_size=1024, intermediate_size=4096)
    assert not check(cpu_ops(quantization="int8"), forms)


@pytest.mark.skipif(not cpu_features().bf16, reason="needs AVX512-BF16")
def test_products_in_bf16_pass_and_are_not_taken_for_exact_ones():
    forms = replace(SMALL, weights_dtype=torch.bfloat16, multiplies_in_bf16=True, **EXPERTS)
    assert not check(cpu_ops(multiplies_in_bf16=True), forms)
    mismatches = check(cpu_ops(multiplies_in_bf16=True), replace(forms, multiplies_in_bf16=False))
    assert {mismatch.kernel for mismatch in mismatches} == {
        "linear after rms_norm", "linear after silu_and_mul", "mixture of experts", "linear of the output head",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_16_bits_passes(dtype):
    """The reference in 16 bits, beside the reference in 16 bits whose inputs are in another order of rounding."""

    class RoundedOps(ReferenceOps):
        def linear(self, x, weights):
            return (x.double() @ weights[0].double().t()).to(x.dtype)

    assert not check(RoundedOps(), replace(SMALL, dtype=dtype, kv_dtype=dtype, weights_dtype=dtype))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *((name, name) for name in ("gather_rows", "rms_norm", "add_rms_norm", "linear")),
        ("gate_and_mul", "silu_and_mul"),
        ("paged_attention", "paged_attention"),
        ("soft_cap", "soft_cap"),
        *((name, f"linear after {name}") for name in ("delta_rule", "gate_columns")),
        ("mix_experts", "mixture of experts"),
        ("add_shared", "add_shared"),
    ],
)
@pytest.mark.parametrize("fault", [1.01, torch.nan, torch.inf])
def test_a_wrong_element_is_noticed(name, kernel, fault):
    class FaultyOps(ReferenceOps):
        pass

    def faulty(self, *args, **options):
        right = getattr(ReferenceOps(), name)(*args, **options)
        one = right[0] if isinstance(right, tuple) else right
        one.view(-1)[one.abs().argmax()] *= fault
        return right

    setattr(FaultyOps, name, faulty)
    mismatches = check(FaultyOps(), replace(SMALL, **CAPPED, **SHARED, **STATES))
    assert any(kernel in mismatch.kernel for mismatch in mismatches)
    assert f"an error of {'inf' if fault != 1.01 else '0.'}" in mismatches[0].reason
    assert "0.001 is allowed" in mismatches[0].reason


@pytest.mark.parametrize("part", [0, 1])
def test_a_wrong_value_in_the_cache_is_noticed(part):
    class FaultyOps(ReferenceOps):
        def rotate_and_store(self, qkv, positions, cos, sin, kv_cache, slot_mapping, **options):
            q = ReferenceOps.rotate_and_store(qkv, positions, cos, sin, kv_cache, slot_mapping, **options)
            kv_cache[part].flatten(0, 1)[slot_mapping[-1]] *= 1.05
            return q

    assert {mismatch.kernel for mismatch in check(FaultyOps())} == {"rotate_and_store", "paged_attention"}


@pytest.mark.parametrize("part", ["conv", "recurrent"])
def test_a_state_that_is_not_kept_is_noticed(part):
    class FaultyOps(ReferenceOps):
        def delta_rule(self, x, gates, weights, states, metadata):
            before = getattr(states, part).clone()
            out = ReferenceOps.delta_rule(x, gates, weights, states, metadata)
            getattr(states, part).copy_(before)
            return out

    (mismatch,) = check(FaultyOps(), replace(SMALL, **STATES))
    assert mismatch.kernel == "linear after delta_rule"


def test_forgotten_norms_of_projections_are_noticed():
    class FaultyOps(ReferenceOps):
        def norm_columns(self, *_):
            pass

    assert {mismatch.kernel for mismatch in check(FaultyOps(), replace(SMALL, **NORMED))} == {"norm_columns"}


def test_forgotten_sinks_and_biases_are_noticed():
    class FaultyOps(ReferenceOps):
        def paged_attention(self, *args, sinks, **options):
            return ReferenceOps.paged_attention(*args, **options)

        def pack_experts(self, router, gate_up, down, routing, _router_bias=None):
            without_bias = [(weight, None) for weight, _ in down]
            return ReferenceOps.pack_experts(self, router, gate_up, without_bias, routing)

    kernels = {mismatch.kernel for mismatch in check(FaultyOps(), replace(SMALL, **BIASED))}
    assert kernels == {"paged_attention", "mixture of experts"}


@pytest.mark.parametrize("window", [49, 51])
def test_a_wrong_window_is_noticed(window):
    class FaultyOps(ReferenceOps):
        def paged_attention(self, *args, sliding_window, **options):
            return ReferenceOps.paged_attention(*args, sliding_window=sliding_window and window, **options)

    mismatches = check(FaultyOps(), replace(SMALL, sliding_windows=(None, 50)))
    assert [mismatch.kernel for mismatch in mismatches] == ["paged_attention"] * 2
    assert all("window 50" in mismatch.reason for mismatch in mismatches)


@pytest.mark.parametrize("row", range(6))
def test_a_wrong_token_is_noticed(row):
    class FaultyOps(ReferenceOps):
        def sample(self, logits, batch):
            sampled = ReferenceOps.sample(logits, batch)
            sampled.token_ids[row] += 1
            return sampled

    (mismatch,) = check(FaultyOps())
    assert mismatch.reason == "sample (vocabulary of 211) has an error of 1, 0.001 is allowed"


def test_a_kernel_that_fails_is_reported_with_its_first_line():
    class FaultyOps(ReferenceOps):
        def gate_and_mul(self, gate_up, gate):
            raise RuntimeError("out of resource: shared memory\nAdvice")

    (mismatch,) = check(FaultyOps())
    assert mismatch.reason.endswith("fails: out of resource: shared memory")


def test_experts_in_a_wrong_order_are_noticed_where_the_caller_chooses():
    class FaultyOps(ReferenceOps):
        def mix_experts(self, *_):
            raise RuntimeError("there is no router")

        def mix_chosen_experts(self, x, experts, choice):
            return ReferenceOps.mix_chosen_experts(self, x, experts, choice._replace(experts=choice.experts.flip(1)))

    assert not check(ReferenceOps(), replace(SMALL, **CHOSEN))
    (mismatch,) = check(FaultyOps(), replace(SMALL, **CHOSEN))
    assert mismatch.kernel == "mixture of experts"
    assert "3 of 4 experts of 40, 64 wide, chosen by the caller) has an error of" in mismatch.reason


def test_cases_of_all_kernels_are_compiled():
    called = set()

    class RecordingOps(ReferenceOps):
        def __getattribute__(self, name):
            called.add(name)
            return super().__getattribute__(name)

    run_cases(RecordingOps(), SMALL, kernel_cases(SMALL, CPU))
    names = {"rms_norm", "add_rms_norm", "gate_and_mul", "linear", "rotate_and_store", "paged_attention", "sample"}
    assert names <= called
