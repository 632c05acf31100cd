"""Time, order and memory of work on a stream."""

from functools import partial

import pytest
import torch

from engine.runner.stream import CudaStream, InlineStream, Stream
from tests.support.engine.stream import LateStream


def test_inline_work_is_done_when_run_returns():
    stream: Stream = InlineStream()
    done = []
    stream.run(lambda: done.append(1))
    assert done == [1]
    stream.mark().wait()


def test_late_work_is_done_in_order_and_before_its_event_has_been_waited_for():
    for seed in range(30):
        stream: Stream = LateStream(seed)
        done = []
        for index in range(5):
            stream.run(partial(done.append, index))
        event = stream.mark()
        stream.run(partial(done.append, 5))
        assert done == list(range(len(done)))
        event.wait()
        assert done[:5] == [0, 1, 2, 3, 4]
        stream.mark().wait()
        assert done == [0, 1, 2, 3, 4, 5]


def test_late_work_is_late_as_a_rule():
    num_done = 0
    for seed in range(100):
        done = []
        LateStream(seed, eagerness=0.3).run(partial(done.append, 1))
        num_done += len(done)
    assert 10 < num_done < 60


@pytest.mark.parametrize("stream", [InlineStream(), LateStream()])
def test_host_buffers_are_bytes_of_their_own(stream):
    first, second = stream.host_buffer(64), stream.host_buffer(64)
    assert (first.dtype, first.shape, first.device.type) == (torch.uint8, (64,), "cpu")
    first.view(torch.int64).fill_(-1)
    second.fill_(0)
    assert first.tolist() == [255] * 64


@pytest.mark.gpu
def test_cuda_copies_from_pinned_memory_in_the_order_of_the_stream():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    stream: Stream = CudaStream(torch.device("cuda"))
    source, result = stream.host_buffer(1 << 20), stream.host_buffer(1 << 20)
    assert source.is_pinned()
    source.fill_(3)
    target = torch.zeros(1 << 20, dtype=torch.uint8, device=stream.device)

    def work():
        target.copy_(source, non_blocking=True)
        target.add_(1)
        result.copy_(target, non_blocking=True)

    stream.run(work)
    stream.mark().wait()
    assert result.eq(4).all()
