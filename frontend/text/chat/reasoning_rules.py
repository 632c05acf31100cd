"""Rules in llguidance's Lark notation for reasoning before a constrained answer."""

from frontend.text.chat.call_family import TokenIdOf, lark_pattern, lark_text


def reasoning_rules(opening: str, closing: str, token_id: TokenIdOf, *, opened: bool) -> str:
    """Returns rules for reasoning and the newlines after it; the first rule is `before`.

    Args:
        opening, closing: the marks.
        token_id: token id of a mark.
        opened: whether the prompt opened the reasoning, which the answer must then close; otherwise it is optional.
    """
    end_id = token_id(closing)
    newlines = r"NEWLINES: /\n{0,2}/"
    if end_id is None:
        end = lark_pattern(closing)
        if opened:
            return f"before: thought NEWLINES\nthought[lazy]: /(?s:.*){end}/\n{newlines}"
        return f"before: | thought NEWLINES\nthought[lazy]: /{lark_pattern(opening)}(?s:.*){end}/\n{newlines}"
    thought, text = f"THOUGHT? <[{end_id}]> NEWLINES", r"THOUGHT: /(?s:.+)/"
    if opened:
        return f"before: {thought}\n{text}\n{newlines}"
    start_id = token_id(opening)
    start = lark_text(opening) if start_id is None else f"<[{start_id}]>"
    return f"before: | {start} {thought}\n{text}\n{newlines}"
