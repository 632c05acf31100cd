"""Checks the nesting depth of a chat template: deep nesting overflows the parser of Jinja, which runs in frontends."""

import re
from pathlib import Path

from engine.errors import CheckpointError

MAX_NESTING = 100
"""Levels of nested blocks, or of nested brackets in one expression. Templates on the hub have less than 20."""

_OPENING = re.compile(r"\{([{%#])")
_CLOSING = {"{": "}}", "%": "%}", "#": "#}"}
_NAME = re.compile(r"[-+]?\s*(\w+)")
_OPENING_BLOCKS = frozenset({"if", "for", "macro", "call", "filter", "generation", "block", "with", "autoescape"})


def check_nesting(path: Path, template: str) -> None:
    """Rejects a template that frontends could not compile.

    Args:
        path: path of the file, for the error.
        template: source of the template.

    Raises:
        CheckpointError: blocks or brackets are nested more than `MAX_NESTING` deep.
    """
    depth = position = 0
    while opening := _OPENING.search(template, position):
        end = template.find(_CLOSING[opening[1]], opening.end())
        if end < 0:
            break  # a syntax error
        inside, position = template[opening.end() : end], end + 2
        if opening[1] == "#":
            continue
        name = _NAME.match(inside)
        if opening[1] == "%" and name is not None:
            depth += (name[1] in _OPENING_BLOCKS) - (name[1].removeprefix("end") in _OPENING_BLOCKS - {name[1]})
        if depth > MAX_NESTING or _num_open_brackets(inside) > MAX_NESTING:
            raise CheckpointError(f"{path}: the chat template is nested more than {MAX_NESTING} levels deep")


def _num_open_brackets(expression: str) -> int:
    """Returns the maximum number of brackets open at the same time."""
    depth = deepest = 0
    for char in expression:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest
