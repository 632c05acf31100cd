import hmac

import pytest

from frontend.access.api_keys import ApiKeys, load_keys
from frontend.errors import ConfigError, Unauthenticated

KEYS = ApiKeys(load_keys(("first-key", "second-key"), None))

BAD = {
    "none": [],
    "empty": [""],
    "empty key": ["Bearer "],
    "scheme alone": ["Bearer"],
    "wrong": ["Bearer third-key"],
    "beginning of a key": ["Bearer first-ke"],
    "key and more": ["Bearer first-key2"],
    "other case": ["Bearer FIRST-KEY"],
    "no scheme": ["first-key"],
    "other scheme": ["Basic first-key"],
    "10 KB": ["Bearer " + "k" * 10_000],
    "no text": [b"Bearer \xff\x00"],
    "not ASCII": ["Bearer sch\u00fcssel"],
    "two values, one of them right": ["Bearer first-key", "Bearer third-key"],
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    with pytest.raises(Unauthenticated) as caught:
        KEYS.check(BAD[name])
    assert str(caught.value) == "a valid API key is needed, as in `authorization: Bearer KEY`"


@pytest.mark.parametrize("value", ["Bearer first-key", b"Bearer second-key", "bearer first-key", "Bearer  second-key "])
def test_each_key_is_accepted(value):
    KEYS.check([value])


def test_without_keys_all_calls_are_accepted():
    ApiKeys(()).check([])
    ApiKeys(()).check(["Bearer whatever"])


@pytest.mark.parametrize("key", ["first-key", "second-key", "neither"])
def test_all_keys_are_compared_in_constant_time(monkeypatch, key):
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr("hmac.compare_digest", compare)
    try:
        KEYS.check([f"Bearer {key}"])
    except Unauthenticated:
        assert key == "neither"
    assert len(compared) == 2
    assert {len(each) for pair in compared for each in pair} == {32}  # digests: as long for any key


def test_keys_of_flags_and_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# for the test\nfrom-file\n\n  another  \n")
    assert [key.text for key in load_keys(["of-flag"], path)] == ["of-flag", "from-file", "another"]


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "schl\u00fcssel", "k" * 1025])
def test_invalid_key_is_refused_without_quoting_it(tmp_path, key):
    with pytest.raises(ConfigError, match="--api-key: a key has 1 to 1024 printable ASCII characters") as caught:
        load_keys([key], None)
    assert not key or key not in str(caught.value)


def test_unusable_key_files_are_named_in_the_error(tmp_path):
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=r"--api-key-file .*keys cannot be read: No such file"):
        load_keys([], path)
    path.write_text("# none\n\n")
    with pytest.raises(ConfigError, match="contains no key"):
        load_keys([], path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not text"):
        load_keys([], path)
    path.write_text("good\nhidden secret\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        load_keys([], path)
    assert "hidden" not in str(caught.value)
