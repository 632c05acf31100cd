import pytest

from frontend.generation.deadline import Deadline


@pytest.mark.parametrize(
    ("total_s", "remaining_s", "passed"),
    [
        (1.0, 0.0, True),
        (1.0, 0.02, True),  # the clocks of both sides are read in milliseconds
        (1.0, 0.1, False),
        (60.0, 0.1, True),  # 59.91 s went over the wire as 60.0
        (60.0, 1.0, False),
        (600.0, 5.0, True),
    ],
)
def test_deadline_has_passed_when_the_clients_clock_may_say_so(total_s, remaining_s, passed):
    remaining = iter([total_s, remaining_s])
    assert Deadline(lambda: next(remaining)).passed() == passed


def test_call_without_a_deadline_never_runs_out_of_time():
    assert not Deadline(lambda: None).passed()
