"""The check for copied runs."""

from tests.support.demo_model.novelty import RUN_WORDS, RunIndex, words_of

TEXT = "One misty morning a shy fox named Ada walked past the old mill to look for honey."


def test_words_drop_case_and_punctuation() -> None:
    assert words_of('"A glow-worm!" said Ada\'s friend, 3 times.') == [
        "a",
        "glow-worm",
        "said",
        "ada's",
        "friend",
        "3",
        "times",
    ]


def test_copied_run_is_found_inside_other_text() -> None:
    index = RunIndex([TEXT])
    run = " ".join(TEXT.split()[2 : 2 + RUN_WORDS])
    assert index.copies_run(f"And then: {run.upper()}, they said")
    assert not index.copies_run(" ".join(run.split()[:-1]) + " thunder")


def test_text_shorter_than_a_run_copies_nothing() -> None:
    assert not RunIndex([TEXT]).copies_run("One misty morning")
    assert not RunIndex([]).copies_run(TEXT)


def test_order_of_words_matters() -> None:
    assert not RunIndex([TEXT]).copies_run(" ".join(reversed(TEXT.split())))


def test_index_counts_its_runs_and_knows_its_words() -> None:
    index = RunIndex([TEXT, TEXT])
    assert len(index) == len(TEXT.split()) - RUN_WORDS + 1
    assert index.knows_word("honey")
    assert not index.knows_word("thunder")
