"""Forms to grammars in llguidance's JSON form. Runs in the worker: what is slow or fatal here ends that alone."""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from frontend.structured.forms import FormError, FormKind
from frontend.structured.schema_rules import check_schema

_JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    # A space, or a line break with indentation: enough for everything that models write, and nothing to ramble in.
    "whitespace_pattern": r" ?|\n[ ]{0,32}",
    "coerce_one_of": False,
    "lenient": False,
}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_UNICODE_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])")


def grammar_of(kind: FormKind, text: str, before: str = "") -> str:
    """The grammar of a form; see `OutputForm`.

    Raises:
        FormError: the form is no form, as far as that shows without a tokenizer.
    """
    grammars = _grammars(kind, text)
    if before:
        grammars[0]["name"] = "form"
        grammars.insert(0, {"lark_grammar": f"start: before @form\n{before}"})
    return json.dumps({"grammars": grammars})


def parser_limits() -> LLParserLimits:
    """What one grammar may cost: the engine's limits, so that what passes here passes there."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


def check_grammar(grammar: str, tokenizer: LLTokenizer) -> None:
    """Compiles a grammar and looks at what it may begin with.

    Raises:
        FormError: it does not compile, or nothing can be written that keeps to it.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise FormError(_complaint(matcher.get_error()))
    matcher.compute_bitmask()
    if matcher.is_error():
        raise FormError(f"nothing can be written that keeps to it ({_complaint(matcher.get_error())})")


def _grammars(kind: FormKind, text: str) -> list[dict[str, Any]]:
    match kind:
        case FormKind.JSON_SCHEMA:
            return [_schema_grammar(_loaded(text))]
        case FormKind.JSON_OBJECT:
            return [_schema_grammar({"type": "object"})]
        case FormKind.REGEX:
            grammars: list[dict[str, Any]] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return grammars
        case FormKind.CHOICE:
            choices = dict.fromkeys(json.loads(text))
            lark = "start: " + " | ".join(_quoted(choice) for choice in choices)
            return [{"lark_grammar": lark}]
        case FormKind.GRAMMAR:
            return [{"lark_grammar": _lark(text)}]
        case FormKind.PARTS:
            parts = json.loads(text)
            schemas = [{**_schema_grammar(schema), "name": name} for name, schema in parts["schemas"].items()]
            return [{"lark_grammar": parts["lark"]}, *schemas]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise FormError("it is nested too deeply") from None
    except ValueError as error:
        raise FormError(f"it is not valid JSON: {error}") from None


def _schema_grammar(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise FormError("a schema must be a JSON object")
    complaint = check_schema(schema)
    if complaint:
        raise FormError(complaint)
    return {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}


def _quoted(text: str) -> str:
    """A text as a string of Lark's notation, which is JSON's."""
    return json.dumps(text)  # all but ASCII escaped: the library takes no DEL in a string


def _lark(text: str) -> str:
    if not _GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(_UNICODE_ESCAPE.sub(_unescaped, text))
    except (GbnfToLarkError, RecursionError) as error:
        raise FormError(f"it is not GBNF: {error}") from None
    except Exception as error:  # the library raises bare Exception for rules that are missing or named alike
        raise FormError(f"it is not GBNF: {error}") from None


def _unescaped(match: re.Match[str]) -> str:
    r"""A character in the place of its \u or \U: the library's conversion loses leading zeros."""
    char = chr(int(match[2] or match[3], 16))
    if char.isascii() and not char.isalnum():
        return f"{match[1]}\\x{ord(char):02x}"  # may mean something in a class or a literal
    return match[1] + char


def _complaint(error: str) -> str:
    """The library's complaint, shorter, with the keywords it names as words."""
    keywords = _UNKNOWN_KEYWORDS.search(error)
    if keywords:
        return f"a schema cannot be held to with {', '.join(json.loads(keywords[1]))}: not supported"
    return error.partition("<state>")[0].strip()[:1000]
