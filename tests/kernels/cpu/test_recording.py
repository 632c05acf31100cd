"""Memory of a recording: reused when nothing refers to it; results have the row count of their input."""

import gc

import pytest
import torch

from kernels.cpu.instruction import FIRST_OPERAND, OPCODE, ROWS, WIDTH, Opcode
from kernels.cpu.recording import Recording


@pytest.fixture
def recording():
    return Recording()


def test_memory_of_dropped_results_is_reused(recording):
    x = torch.zeros(5, 3)
    first = recording.empty(x, 4)
    address = first.data_ptr()
    assert recording.empty(x, 2).data_ptr() != address  # another size
    second = recording.empty(x, 4)
    assert second.data_ptr() != address
    del first
    third = recording.empty(x, 2, 2)
    assert third.data_ptr() == address
    assert third.shape == (5, 2, 2)
    assert recording.empty(x, 4).data_ptr() not in (address, second.data_ptr())


def test_views_keep_memory_in_use(recording):
    x = torch.zeros(5, 3)
    result = recording.empty(x, 4)
    address, view = result.data_ptr(), result.view(5, 2, 2)[:, 1:]
    del result
    assert recording.empty(x, 4).data_ptr() != address
    array = view.numpy()
    del view
    assert recording.empty(x, 4).data_ptr() != address
    del array
    assert recording.empty(x, 4).data_ptr() == address


def test_a_chain_of_operations_takes_the_memory_of_two(recording):
    x = torch.zeros(5, 4)
    addresses = set()
    for _ in range(20):
        x = recording.empty(x, 4)
        addresses.add(x.data_ptr())
    assert len(addresses) == 2


def test_results_have_the_row_count_of_what_they_were_made_from(recording):
    tokens, rows = torch.zeros(5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    num_tokens, num_rows = torch.tensor([5]), torch.tensor([2])
    recording.add_input(tokens, num_tokens)
    recording.add_input(rows, num_rows)
    x = recording.empty(tokens, 6)
    assert recording.row_count(x) is num_tokens
    assert recording.row_count(recording.empty(x[:, 2:], 3)) is num_tokens
    y = recording.empty(rows, 6)
    assert recording.row_count(y.view(2, 3, 2)) is num_rows
    assert (x.shape, y.shape) == ((5, 6), (2, 6))


def test_reused_memory_has_the_row_count_of_its_new_owner(recording):
    tokens, rows = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    num_tokens, num_rows = torch.tensor([6]), torch.tensor([2])
    recording.add_input(tokens, num_tokens)
    recording.add_input(rows, num_rows)
    x = recording.empty(tokens, 4)
    address = x.data_ptr()
    recording.emit(Opcode.GATE, x)
    del x
    y = recording.empty(rows, 12)
    assert y.data_ptr() == address
    recording.emit(Opcode.GATE, y)
    instructions, _ = recording.instructions()
    assert instructions[:, ROWS].tolist() == [num_tokens.data_ptr(), num_rows.data_ptr()]


def test_undeclared_tensors_keep_their_row_count_and_stay_alive(recording):
    x = torch.zeros(5, 3)
    count = recording.row_count(x)
    assert count.tolist() == [5]
    address = x.data_ptr()
    del x
    gc.collect()
    others = [torch.zeros(5, 3) for _ in range(50)]  # would take the memory if it were free
    assert address not in {other.data_ptr() for other in others}


def test_instructions_are_rows_of_numbers_and_one_value_each(recording):
    x = torch.zeros(5, 3)
    recording.emit(Opcode.RMS_NORM, x, 11, 12, value=0.5)
    recording.emit(Opcode.LINEAR, x, 13)
    instructions, values = recording.instructions()
    assert instructions.shape == (2, WIDTH)
    assert instructions[:, OPCODE].tolist() == [Opcode.RMS_NORM, Opcode.LINEAR]
    assert instructions[0, FIRST_OPERAND : FIRST_OPERAND + 3].tolist() == [11, 12, 0]
    assert list(values) == [0.5, 0.0]


def test_an_empty_recording_has_no_instructions(recording):
    assert recording.instructions()[0].shape == (0, WIDTH)


def test_results_stay_valid_after_their_recording():
    result = Recording().empty(torch.zeros(5, 3), 4).fill_(7)
    gc.collect()
    others = [torch.zeros(5, 4) for _ in range(50)]
    assert result.data_ptr() not in {other.data_ptr() for other in others}
    assert (result == 7).all()
