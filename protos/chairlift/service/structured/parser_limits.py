"""Limits of llguidance on the work of one grammar: the same in the frontend's trial and in the engine."""

from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """Returns the limits of one grammar. Work is measured in fuel: 50 per microsecond of compiling, 14 of a step."""
    return LLParserLimits(
        max_items_in_row=5_000,  # 1,200 optional members, 5,000 alternatives
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 14 ms
        step_max_items=50_000,  # 2.5 ms
        max_lexer_states=50_000,  # 1 to 2 KB each: 100 MB at most
        max_grammar_size=50_000,  # symbols; the library itself ends at 65,000
        precompute_large_lexemes=True,
        verbose_errors=False,  # True adds the whole grammar and the parser's state
    )
