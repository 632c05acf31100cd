"""Names of a model and its adapters, and what engines must have in common."""

from dataclasses import replace

import pytest

from frontend.text.served_model import Adapter, ServedModel


@pytest.fixture
def model(tokenizer, defaults):
    adapters = (Adapter("a", b"1"), Adapter("b", b"2"))
    return ServedModel("base", "none", 4096, 258, (256,), 20, tokenizer, defaults, adapters)


class Tokenizer:
    sha256 = b"tokenizer"


@pytest.fixture
def tokenizer():
    return Tokenizer()


@pytest.fixture
def defaults():
    return None


def test_a_name_is_that_of_the_model_or_of_an_adapter(model):
    assert model.named("") is model
    assert model.named("base") is model
    assert model.named("c") is None
    adapted = model.named("b")
    assert (adapted.name, adapted.parent, adapted.adapter) == ("b", "base", "b")
    assert (model.parent, model.adapter) == (None, "")
    assert adapted.named("b") is adapted
    assert adapted.named("a").parent == "base"


def test_an_alias_names_the_model_itself(model):
    model = replace(model, aliases=("c", "d"))
    assert model.named("c") is model.named("d") is model
    adapted = model.named("a")
    assert (adapted.name, adapted.parent, adapted.aliases) == ("a", "base", ())
    assert adapted.named("c") is None
    assert model.key == replace(model, aliases=()).key


def test_a_request_is_bound_to_the_digest_of_its_adapter(model):
    assert (model.named("a").adapter_sha256, model.named("b").adapter_sha256) == (b"1", b"2")
    assert model.adapter_sha256 == b""


def test_engines_with_different_adapters_serve_one_model(model):
    for adapters in ((), model.adapters[:1], (Adapter("a", b"1"), Adapter("b", b"3"))):
        assert replace(model, adapters=adapters).key == model.named("a").key == model.key
