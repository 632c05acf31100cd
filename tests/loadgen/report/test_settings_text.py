"""A reader finds words, and nothing that was set is lost."""

from loadgen.report.settings_text import settings_facts


def _facts(**settings: object) -> dict[str, str]:
    return {fact.name: fact.value for fact in settings_facts(settings)}


def test_settings_have_names_and_units() -> None:
    assert _facts(
        target="grpc://127.0.0.1:50051",
        prompt_mode="ids",
        ignore_eos=True,
        cancel_rate=0.05,
        drain_timeout_s=600.0,
        measure={"warmup_s": 10.0, "slo": {"ttft": 500.0, "tpot": 12.5}, "percentiles": [50.0, 99.9]},
        host={"usable_cpus": 2, "packages": {"grpcio": "1.85.1", "numpy": "2.4.6"}},
        tags={"gpu": "none"},
    ) == {
        "Server": "grpc://127.0.0.1:50051",
        "Prompt mode": "token ids",
        "ignore_eos (fixed output length)": "yes",
        "Cancellation rate": "5 %",
        "Drain timeout": "600 s",
        "Warm-up excluded": "10 s",
        "SLO limits": "ttft 500 ms, tpot 12.5 ms",
        "Percentiles": "50, 99.9",
        "Usable CPUs": "2",
        "Packages": "grpcio 1.85.1, numpy 2.4.6",
        "Tags": "gpu none",
    }


def test_what_was_not_used_takes_no_line() -> None:
    assert _facts(max_concurrency=None, overflow="queue", timeout_s=None, warnings=[], tags={}, text_prompts=None) == {}
    assert _facts(max_concurrency=8, overflow="drop") == {
        "Maximum concurrency": "8",
        "Overflow policy": "drop",
    }


def test_a_setting_without_a_name_is_shown_under_its_key() -> None:
    assert _facts(some_new={"thing_s": 1.25, "on": False}, words=["a", "b"]) == {
        "some new: thing s": "1.25",
        "some new: on": "no",
        "words": "a, b",
    }
