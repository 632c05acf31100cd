"""Writes a grammar of llguidance in the forms that other engines accept: a JSON Schema, or one Lark text. Pure."""

import json
import re
from typing import Any, NamedTuple


class PortableGrammar(NamedTuple):
    """A grammar; one of the two is set.

    Attributes:
        json_schema: a JSON Schema, with llguidance's options under `x-guidance`, which other libraries ignore.
        lark: a Lark grammar with llguidance's `%json` and `%lark`.
    """

    json_schema: str = ""
    lark: str = ""


_REFERENCE = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/)|@([A-Za-z_]\w*)')
"""A string or an expression, in which `@` is a character, or a reference to another grammar."""

_NO_OPTIONS = re.compile(r"^\s*%llguidance\s*\{\s*\}\s*$", re.MULTILINE)
"""A directive without an option, as the library's conversion of GBNF writes it; other libraries do not know it."""


def portable(grammar: str) -> PortableGrammar:
    """Converts a submission's grammar.

    Args:
        grammar: `{"grammars": [...]}`, in which later grammars have names that earlier ones refer to as `@name`.

    Raises:
        ValueError: it has another form.
    """
    try:
        first, *named = json.loads(grammar)["grammars"]
        if not named and first.get("json_schema"):
            return PortableGrammar(json_schema=json.dumps(first["json_schema"]))
        rules = "".join(f"part_{one['name']}: {_nested(one)}\n" for one in named)
        return PortableGrammar(lark=f"{_renamed(first['lark_grammar'])}\n{rules}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the grammar has a form that cannot be converted: {error!r}") from error


def _nested(grammar: dict[str, Any]) -> str:
    if grammar.get("json_schema"):
        return f"%json {json.dumps(grammar['json_schema'])}"
    return f"%lark {{\n{_renamed(grammar['lark_grammar'])}\n}}"


def _renamed(lark: str) -> str:
    return _REFERENCE.sub(lambda match: match[1] or f"part_{match[2]}", _NO_OPTIONS.sub("", lark)).strip()
