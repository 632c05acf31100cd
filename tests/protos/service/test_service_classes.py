"""The file of service classes: what is read, and the one line for each error."""

import pytest

from chairlift.service.service_classes import (
    ServiceClass,
    ServiceClassError,
    parse_service_classes,
    read_service_classes,
)


def test_classes_are_read_in_order_with_their_units_and_defaults(tmp_path):
    path = tmp_path / "classes.toml"
    path.write_text(
        "[classes.interactive]\nttft_ms = 500\ninter_token_ms = 30\nweight = 2\npacing = 'paced'\n"
        "when_infeasible = 'refuse'\nheadroom = 0.25\n"
        "[classes.slow]\ntokens_per_second = 20\n"
        "[classes.batch]\n"
    )
    classes = read_service_classes(path)
    assert list(classes) == ["interactive", "slow", "batch"]
    assert classes["interactive"] == ServiceClass(
        name="interactive", ttft_s=0.5, inter_token_s=0.03, weight=2.0, pacing="paced", when_infeasible="refuse",
        headroom=0.25,
    )  # fmt: skip
    assert classes["slow"] == ServiceClass(name="slow", inter_token_s=0.05)
    assert classes["batch"] == ServiceClass(name="batch")
    assert classes["slow"].has_targets
    assert not classes["batch"].has_targets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[classes.a]\nttft_ms = 0", "ttft_ms is 0; it must be a number above 0"),
        ("[classes.a]\nttft_ms = true", "ttft_ms is True"),
        ("[classes.a]\nttft_ms = nan", "ttft_ms is nan"),
        ("[classes.a]\nttft_ms = 1e12", "at most 86400000"),
        ("[classes.a]\nttft = 500", "unknown field 'ttft'"),
        ("[classes.a]\nttft_ms = '500'", "ttft_ms is '500'"),
        ("[classes.a]\ninter_token_ms = 30\ntokens_per_second = 33", "both inter_token_ms and tokens_per_second"),
        ("[classes.a]\nttft_ms = 5\nheadroom = 1", "headroom is 1"),
        ("[classes.a]\nttft_ms = 5\nwhen_infeasible = 'drop'", "'refuse', 'degrade', 'wait'"),
        ("[classes.a]\ninter_token_ms = 5\npacing = 'fast'", "pacing is 'fast'"),
        ("[classes.a]\ninter_token_ms = 5\npacing = ['gap']", "pacing is ['gap']"),
        ("[classes.a]\nheadroom = 0.5", "headroom without ttft_ms"),
        ("[classes.a]\npacing = 'gap'", "pacing without inter_token_ms"),
        ("[classes.a]\nweight = -1", "weight is -1"),
        ("[classes.'a b']\nttft_ms = 5", "class name 'a b'"),
        ("[classes]\na = 5", "[classes.a] must be a table"),
        ("[tiers.a]\nttft_ms = 5", "unknown field 'tiers'"),
        ("", "there is no table [classes.NAME]"),
        ("[classes.a", "f.toml: "),
        ("".join(f"[classes.c{i}]\n" for i in range(65)), "65 classes, at most 64"),
    ],
)
def test_an_error_is_one_line_that_names_the_field(text, message):
    with pytest.raises(ServiceClassError) as error:
        parse_service_classes(text, "f.toml")
    assert str(error.value).startswith("f.toml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ServiceClassError, match=r"none\.toml: No such file"):
        read_service_classes(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(ServiceClassError, match="not UTF-8 at byte 0"):
        read_service_classes(tmp_path / "binary.toml")
