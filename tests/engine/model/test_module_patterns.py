"""Lists of modules: what a name selects, and that thousands of names cost no more than one."""

import random
import re
import time

import pytest

from engine.model.config_fields import ConfigFields
from engine.model.module_patterns import is_selected, module_patterns

NAMES = ["a", "b.c", "a.b.c", "gate", "0", "c."]


def patterns_of(names):
    return module_patterns(ConfigFields.from_json("config.json", {"ignore": names}), "ignore")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_selects_modules_that_end_with_it_and_those_below(name):
    rule = re.compile(rf"(.*\.)?{re.escape(name.rstrip('.'))}(\.|$)")
    numbers = random.Random(0)
    selected = set()
    for _ in range(2000):
        module = ".".join(numbers.choices(["a", "b", "c", "gate", "gate_proj", "0", "10"], k=numbers.randint(1, 5)))
        assert is_selected(module, patterns_of([name]), None) == (rule.match(module) is None), module
        selected.add(is_selected(module, patterns_of([name]), None))
    assert selected == {True, False}


def test_names_and_wildcards_in_one_list():
    patterns = patterns_of(["lm_head", "model.layers.0*", "re:.*experts$"])
    modules = {"lm_head": False, "model.layers.01.mlp": False, "a.experts": False, "model.layers.1.mlp": True}
    assert {module: is_selected(module, patterns, None) for module in modules} == modules


def test_thousands_of_names_take_no_longer_for_each_of_many_experts():
    patterns = patterns_of([f"model.layers.{layer}.mlp.gate" for layer in range(4096)])
    start = time.process_time()
    for expert in range(20_000):
        assert is_selected(f"model.layers.1.mlp.experts.{expert}.gate_proj", patterns, None)
    assert time.process_time() - start < 20, "a search through the list would take minutes"
