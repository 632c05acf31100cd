import itertools

import pytest

from loadgen.errors import OptionError
from loadgen.mock.behaviour import MockBehaviour, Stall


@pytest.mark.parametrize("tokens_per_message", [1, 4])
@pytest.mark.parametrize("num_asked", [1, 2, 5, 16, 21])
def test_every_token_leaves_when_the_last_of_its_message_is_due(tokens_per_message: int, num_asked: int) -> None:
    answer = MockBehaviour(ttft_s=0.05, itl_s=0.01, tokens_per_message=tokens_per_message).answer(0, num_asked)
    assert not answer.fails
    assert [message.first for message in answer.messages[:2]] == [0, 1][: len(answer.messages)]
    assert sum(message.num_tokens for message in answer.messages) == num_asked
    for message in answer.messages:
        assert message.due_s == pytest.approx(0.05 + 0.01 * (message.first + message.num_tokens - 1))
        assert message.num_tokens <= tokens_per_message
    assert all(message.num_tokens == tokens_per_message for message in answer.messages[1:-1])


def test_jitter_stays_in_its_bounds_and_is_the_same_every_time() -> None:
    behaviour = MockBehaviour(itl_s=0.01, jitter=0.5)
    times = [message.due_s for message in behaviour.answer(3, 200).messages]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert 0.005 <= min(gaps) < 0.006
    assert 0.014 < max(gaps) <= 0.015
    assert behaviour.answer(3, 200) == behaviour.answer(3, 200) != behaviour.answer(4, 200)


def test_the_share_of_errors_is_kept_half_at_once_half_in_mid_answer() -> None:
    behaviour = MockBehaviour(error_rate=0.3)
    failed = [answer for answer in (behaviour.answer(number, 10) for number in range(2000)) if answer.fails]
    assert 500 < len(failed) < 700
    at_once = [answer for answer in failed if not answer.messages]
    assert 0.4 < len(at_once) / len(failed) < 0.6
    assert {len(answer.messages) for answer in failed} == {0, 5}


def test_probes_are_spared_unless_it_is_forbidden() -> None:
    sick = MockBehaviour(error_rate=1.0, output_share=0.5)
    assert (len(sick.answer(0, 4).messages), sick.answer(0, 4).fails) == (4, False)
    assert sick.answer(0, 5).fails
    assert len(MockBehaviour(output_share=0.5, spares_probes=False).answer(0, 4).messages) == 2


def test_an_answers_clock_stands_still_during_a_stall() -> None:
    stall = Stall(1_000_000_000, 3_000_000_000)
    arrivals_s = [0.0, 0.0, 0.5, 0.5, 0.999, 1.0, 2.5, 2.999, 3.0, 10.0]
    dues_s = [0.9, 1.0, 0.4, 0.6, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    for arrived_s, due_s in zip(arrivals_s, dues_s, strict=True):
        # Brute force: the answer's own time passes in steps of a millisecond outside the stall only.
        now_ms, own_ms = round(arrived_s * 1000), 0
        while own_ms < round(due_s * 1000) or 1000 <= now_ms < 3000:
            own_ms += not 1000 <= now_ms < 3000
            now_ms += 1
        assert stall.leaves_ns(round(arrived_s * 1e9), due_s) == now_ms * 1_000_000, (arrived_s, due_s)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"jitter": 1.5}, "jitter is 1.5"),
        ({"error_rate": -0.1}, "error_rate is -0.1"),
        ({"output_share": 0.0}, "output_share is 0.0"),
        ({"ttft_s": -1.0}, "ttft_s is -1.0"),
        ({"tokens_per_message": 0}, "tokens_per_message is 0"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], name: str) -> None:
    with pytest.raises(OptionError, match=name):
        MockBehaviour(**values)  # type: ignore[arg-type]


def test_text_is_counted_in_words() -> None:
    behaviour = MockBehaviour(overhead_tokens=3, long_word=5)
    assert behaviour.num_text_tokens("four words and another") == 3 + 5
