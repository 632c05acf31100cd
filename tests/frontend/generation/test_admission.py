import contextlib
import random

import pytest

from frontend.errors import InvalidRequest, QueueFull, RequestTooLong
from frontend.generation.admission import Admission


def test_requests_are_bounded():
    admission = Admission(max_requests=2, max_tokens=100)
    first, _ = admission.admit(1, 0.0), admission.admit(1, 0.0)
    with pytest.raises(QueueFull, match="2 requests wait for their first token, at most 2 may"):
        admission.admit(1, 0.0)
    first.release(0.0)
    admission.admit(1, 0.0)


def test_tokens_are_bounded():
    admission = Admission(max_requests=10, max_tokens=100)
    admission.admit(60, 0.0)
    with pytest.raises(QueueFull, match="60 prompt tokens wait to be computed, 41 more would exceed 100"):
        admission.admit(41, 0.0)
    admission.admit(40, 0.0)


def test_one_request_may_exceed_the_token_bound_alone():
    admission = Admission(max_requests=10, max_tokens=100)
    permit = admission.admit(1000, 0.0)
    with pytest.raises(QueueFull):
        admission.admit(1, 0.0)
    permit.release(0.0)
    admission.admit(1, 0.0)


def test_correction_counts_the_true_number():
    admission = Admission(max_requests=10, max_tokens=100)
    admission.admit(50, 0.0)
    permit = admission.admit(10, 0.0)
    permit.correct(50, 0.0)
    assert admission.num_tokens == 100
    permit.correct(5, 0.0)
    assert admission.num_tokens == 55
    with pytest.raises(QueueFull):
        permit.correct(51, 0.0)
    permit.release(0.0)
    assert (admission.num_requests, admission.num_tokens) == (1, 50)


def test_release_counts_once():
    admission = Admission(max_requests=10, max_tokens=100)
    permit = admission.admit(10, 0.0)
    permit.release(1.0, served=True)
    permit.release(2.0)
    permit.release(3.0, served=True)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def retry_after_s(admission, num_tokens, now_s):
    with pytest.raises(QueueFull) as caught:
        admission.admit(num_tokens, now_s)
    return caught.value.retry_after_s


def test_retry_time_follows_the_measured_rate_of_requests():
    for per_second, expected in ((0.5, 2.0), (1.0, 1.0), (5.0, 0.5)):
        admission = Admission(max_requests=1, max_tokens=1000)
        for number in range(10):
            admission.admit(1, 0.0).release(100 + number / per_second, served=True)
        admission.admit(1, 0.0)
        now_s = 100 + 10 / per_second
        assert retry_after_s(admission, 1, now_s) == pytest.approx(expected)


def test_retry_time_follows_the_measured_rate_of_tokens():
    admission = Admission(max_requests=10, max_tokens=1000)
    for number in range(5):
        admission.admit(200, 0.0).release(100.0 + number, served=True)  # 200 tokens per second
    admission.admit(1000, 0.0)
    assert retry_after_s(admission, 600, 105.0) == pytest.approx(3.0)


def test_retry_time_forgets_and_is_bounded():
    admission = Admission(max_requests=1, max_tokens=1000)
    admission.admit(1, 0.0).release(0.0, served=True)
    admission.admit(1, 0.0)
    assert retry_after_s(admission, 1, 9.0) == pytest.approx(9.0)
    assert retry_after_s(admission, 1, 1000.0) == 1.0  # nothing measured lately
    slow = Admission(max_requests=10, max_tokens=10)
    slow.admit(1, 0.0).release(0.0, served=True)
    slow.admit(10, 0.0)
    assert retry_after_s(slow, 10_000, 9.0) == 30.0


def test_unserved_permits_say_nothing_about_the_rate():
    admission = Admission(max_requests=1, max_tokens=1000)
    for _ in range(100):
        admission.admit(1, 0.0).release(0.0)
    admission.admit(1, 0.0)
    assert retry_after_s(admission, 1, 1.0) == 1.0


def test_sums_hold_over_random_operations():
    rng = random.Random(1)
    admission = Admission(max_requests=20, max_tokens=500)
    permits = []
    for now_s in range(5000):
        with contextlib.suppress(QueueFull):
            match rng.randrange(3):
                case 0:
                    permits.append(admission.admit(rng.randrange(80), float(now_s)))
                case 1 if permits:
                    rng.choice(permits).correct(rng.randrange(80), float(now_s))
                case 2 if permits:
                    permits.pop(rng.randrange(len(permits))).release(float(now_s), served=rng.random() < 0.5)
        assert admission.num_requests == len(permits) <= 20
        assert admission.num_tokens == sum(permit.num_tokens for permit in permits) <= 500


def test_permits_of_a_prompt_are_granted_all_or_none():
    admission = Admission(max_requests=4, max_tokens=100)
    admission.admit(1, 0.0)
    with pytest.raises(QueueFull, match="1 requests wait for their first token, at most 4 may; 4 more are too many"):
        admission.admit_call([10], 4, 0.0)
    assert (admission.num_requests, admission.num_tokens) == (1, 1)
    (permits,) = admission.admit_call([10], 3, 0.0)
    assert (admission.num_requests, admission.num_tokens) == (4, 11)
    permits[0].release(0.0)
    assert (admission.num_requests, admission.num_tokens) == (3, 1)
    for permit in permits:
        permit.release(0.0)
    assert (admission.num_requests, admission.num_tokens) == (1, 1)


def test_request_larger_than_the_queue_is_invalid():
    admission = Admission(max_requests=6, max_tokens=100)
    with pytest.raises(InvalidRequest, match=r"7 answers are requested, and at most 6 .*--max-queued-requests"):
        admission.admit_call([1], 7, 0.0)
    with pytest.raises(InvalidRequest, match="4 prompts with 2 answers each are 8 requests, and at most 6"):
        admission.admit_call([1] * 4, 2, 0.0)
    with pytest.raises(
        RequestTooLong, match=r"the prompt has 101 tokens, and in all at most 100 .*--max-queued-tokens"
    ):
        admission.check_fits(1, 101)
    admission.check_fits(6, 100)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_permits_of_a_call_are_granted_all_or_none():
    admission = Admission(max_requests=6, max_tokens=100)
    first = admission.admit_call([10, 20], 2, 0.0)
    assert [[permit.num_tokens for permit in permits] for permits in first] == [[10, 0], [20, 0]]
    assert (admission.num_requests, admission.num_tokens) == (4, 30)
    with pytest.raises(QueueFull):
        admission.admit_call([1] * 3, 1, 0.0)
    with pytest.raises(QueueFull):
        admission.admit_call([40, 31], 1, 0.0)
    assert (admission.num_requests, admission.num_tokens) == (4, 30)
    for permits in first:
        for permit in permits:
            permit.release(0.0)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_full_queue_refuses_a_request_before_it_is_read():
    admission = Admission(max_requests=1, max_tokens=100)
    admission.check_capacity(0.0)
    permit = admission.admit(10, 0.0)
    with pytest.raises(QueueFull, match="1 requests wait for their first token, at most 1 may"):
        admission.check_capacity(0.0)
    permit.release(0.0)
    admission.check_capacity(0.0)
