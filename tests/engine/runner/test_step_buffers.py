"""One layout for host and device: sections apart, aligned, of the types kernels expect."""

from dataclasses import fields

import numpy as np
import torch

from engine.runner.step_buffers import StepLayout, StepSections

LAYOUT = StepLayout(max_num_seqs=5, max_num_tokens=70, max_blocks=9, has_adapters=True, has_state=True)
TYPES = {
    torch.int32: [
        "query_start_loc",
        "seq_lens",
        "state_slots",
        "ints",
        "forced_ids",
        "bias_start",
        "bias_ids",
        "block_table",
    ],
    torch.int64: [
        "logits_indices",
        "longs",
        "input_ids",
        "positions",
        "slot_mapping",
        "adapted_indices",
        "adapters",
    ],
    torch.float64: ["doubles"],
    torch.float32: ["bias_values"],
}


def _sections(sections):
    return {field.name: getattr(sections, field.name) for field in fields(StepSections)}


def test_sections_are_aligned_and_do_not_overlap():
    memory = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    arrays = _sections(LAYOUT.arrays(memory))
    ends = 0
    for array in arrays.values():
        offset = array.ctypes.data - memory.data_ptr()
        assert offset % 256 == 0
        assert offset >= ends
        ends = offset + array.nbytes
    assert ends == LAYOUT.num_bytes
    assert list(arrays)[-1] == "block_table"
    assert LAYOUT.num_head_bytes == arrays["block_table"].ctypes.data - memory.data_ptr()


def test_sections_have_the_types_of_the_tensors_they_become():
    tensors = _sections(LAYOUT.tensors(torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)))
    for dtype, names in TYPES.items():
        assert {tensors[name].dtype for name in names} == {dtype}
    assert sum(map(len, TYPES.values())) == len(tensors)


def test_only_an_engine_with_adapters_has_sections_for_them():
    without = StepLayout(max_num_seqs=5, max_num_tokens=70, max_blocks=9, has_state=True)
    arrays = without.arrays(torch.zeros(without.num_bytes, dtype=torch.uint8))
    assert not arrays.adapted_indices.size
    assert not arrays.adapters.size
    assert LAYOUT.num_bytes - without.num_bytes == 2 * 768  # 70 int64 are 560 bytes, aligned to 256


def test_a_copy_of_the_bytes_is_a_copy_of_all_sections():
    host, device = (torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(2))
    for value, array in enumerate(_sections(LAYOUT.arrays(host)).values(), 1):
        array[...] = value
    device.copy_(host)
    for value, tensor in enumerate(_sections(LAYOUT.tensors(device)).values(), 1):
        assert tensor.eq(value).all()


def test_host_arrays_and_cpu_tensors_of_one_memory_are_the_same():
    memory = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    LAYOUT.arrays(memory).seq_lens[:] = np.arange(5)
    assert LAYOUT.tensors(memory).seq_lens.tolist() == [0, 1, 2, 3, 4]


def test_on_a_cpu_every_section_has_a_storage_of_its_own():
    """CPU operations know by it how many rows a tensor has."""
    tensors = _sections(LAYOUT.tensors(torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8))).values()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
