from loadgen.run.preparer import Preparer


def preparer(tokens: list[int], budget: int) -> tuple[Preparer, list[int]]:
    made: list[int] = []

    def make(index: int) -> str:
        made.append(index)
        return f"request {index}"

    order = [10 * place for place in range(len(tokens))]
    return Preparer(order, make, tokens, budget), made


def test_all_are_made_at_once_where_there_is_room() -> None:
    requests, made = preparer([5, 5, 5], 15)
    requests.fill()
    assert made == [0, 10, 20]
    assert requests.is_done
    assert [requests.take(index) for index in (0, 20, 10)] == ["request 0", "request 20", "request 10"]
    assert made == [0, 10, 20]


def test_no_more_lie_ready_than_there_is_room_for() -> None:
    requests, made = preparer([5, 5, 5, 5], 12)
    requests.fill()
    assert made == [0, 10]
    assert not requests.has_room
    requests.take(0)
    assert requests.has_room
    requests.fill()
    assert made == [0, 10, 20]


def test_one_that_is_larger_than_the_room_is_made_alone() -> None:
    requests, made = preparer([50, 5], 12)
    requests.fill()
    assert made == [0]


def test_one_that_is_wanted_is_made_even_without_room() -> None:
    requests, made = preparer([5, 5, 5], 5)
    requests.fill()
    assert requests.take(20) == "request 20"
    assert made == [0, 10, 20]
    assert (requests.take(0), requests.take(10)) == ("request 0", "request 10")


def test_one_that_is_dropped_is_not_made() -> None:
    requests, made = preparer([5, 5, 5], 5)
    requests.fill()
    requests.drop(0)
    requests.drop(10)
    assert requests.take(20) == "request 20"
    assert made == [0, 20]
