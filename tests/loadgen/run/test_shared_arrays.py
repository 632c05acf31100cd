import multiprocessing

from loadgen.record import REQUEST, new_requests
from loadgen.run.shared_arrays import PROGRESS, SharedArray
from tests.hang import HANG_S


def test_rows_are_zeros_and_the_same_memory_every_time() -> None:
    shared = SharedArray.new(3, PROGRESS)
    shared.rows()["num_chunks"] = [1, 2, 3]
    assert shared.rows().tolist() == [(1, 0), (2, 0), (3, 0)]
    assert len(SharedArray.new(0, PROGRESS).rows()) == 0


def write_seven(shared: SharedArray) -> None:
    shared.rows()["sent_ns"][2] = 7


def test_another_process_writes_into_the_same_rows() -> None:
    shared = SharedArray.new(4, REQUEST)
    shared.rows()[:] = new_requests(4)
    process = multiprocessing.get_context("spawn").Process(target=write_seven, args=(shared,))
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 0
    assert shared.rows()["sent_ns"].tolist() == [-1, -1, 7, -1]
