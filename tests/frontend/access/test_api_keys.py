import hmac

import pytest

from frontend.access.api_keys import ApiKeys, check_classes, load_keys
from frontend.access.caller import Caller
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


def test_a_line_says_who_calls_with_the_key(tmp_path):
    path = tmp_path / "keys"
    path.write_text("a class=interactive,batch tenant=acme\nb tenant=umbrella\nc class=batch\nd\n")
    callers = [key.caller for key in load_keys([], path)]
    assert callers[0] == Caller("acme", ("interactive", "batch"))
    assert callers[1] == Caller("umbrella")
    assert callers[2].classes == ("batch",)
    assert callers[3].classes == ()
    assert callers[2].tenant != callers[3].tenant
    assert all(caller.tenant.startswith("key-") for caller in callers[2:])


def test_check_returns_the_caller_of_the_key(tmp_path):
    path = tmp_path / "keys"
    path.write_text("a tenant=acme\nb tenant=umbrella\n")
    keys = ApiKeys(load_keys([], path))
    assert keys.check(["Bearer a"]).tenant == "acme"
    assert keys.check([], [b"b"]).tenant == "umbrella"
    assert ApiKeys(()).check([]) == Caller()


def test_the_tenant_of_a_key_is_the_same_in_every_process_and_does_not_contain_it():
    (key,) = load_keys(["secret"], None)
    assert key.caller.tenant == load_keys(["secret"], None)[0].caller.tenant
    assert "secret" not in key.caller.tenant


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a klass=x", "behind the key are only class=NAME,... and tenant=NAME; a key has no spaces"),
        ("a class", "behind the key are only class="),
        ("a class=", "class= has an empty name"),
        ("a class=x,,y", "class= has an empty name"),
        ("a class=x class=y", "class= is there twice"),
        ("a tenant=", "tenant= must have 1 to 64 printable ASCII characters"),
        ("a tenant=" + "x" * 65, "tenant= must have 1 to 64"),
        ("a tenant=\u00e4", "tenant= must have 1 to 64"),
    ],
)
def test_bad_fields_behind_a_key_name_the_line(tmp_path, line, message):
    path = tmp_path / "keys"
    path.write_text(f"good\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_keys([], path)
    assert f"line 2: {message}" in str(caught.value)


def test_classes_of_keys_must_exist(tmp_path):
    path = tmp_path / "keys"
    path.write_text("a class=gold\n")
    keys = load_keys([], path)
    check_classes(keys, ["gold"])
    with pytest.raises(ConfigError, match=r"keys, line 1: class 'gold' is not in --service-classes; it has batch"):
        check_classes(keys, ["batch"])
    with pytest.raises(ConfigError, match=r"line 1: class=gold needs --service-classes"):
        check_classes(keys, [])
