import logging

import pytest

from frontend.text.sampling_defaults import API_DEFAULTS, sampling_defaults

DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def test_without_a_file_the_apis_defaults_apply():
    assert sampling_defaults({}) == DEFAULTS


def test_values_of_the_file():
    content = b'{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": true, "eos_token_id": [1, 2]}'
    expected = DEFAULTS | {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert sampling_defaults({"generation_config.json": content}) == expected
    content = b'{"min_p": 0.05, "repetition_penalty": 1.05}'
    assert sampling_defaults({"generation_config.json": content}) == DEFAULTS | {
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(
    "content",
    [
        b'{"temperature": -1, "top_p": 0, "top_k": -1, "min_p": 2, "repetition_penalty": 0}',
        b'{"temperature": "hot", "top_p": true, "top_k": NaN}',
        b"[]",
        b"not json",
        b"\xff\xfe",
    ],
)
def test_invalid_values_are_logged_and_ignored(content, caplog):
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults({"generation_config.json": content}) == API_DEFAULTS
    assert "generation_config.json" in caplog.text


def test_null_means_the_default(caplog):
    assert sampling_defaults({"generation_config.json": b'{"temperature": null}'}) == API_DEFAULTS
    assert not caplog.records
