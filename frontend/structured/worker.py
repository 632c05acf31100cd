"""The process that compiles grammars, see `frontend.isolated.worker`: `python -m frontend.structured.worker`.

-> {"tokenizer": ..., "vocab_size": ..., "end_token_ids": [...]}      <- {}
-> {"kind": ..., "text": ..., "before": ...}                          <- {"grammar": ...}, again and again
"""

from llguidance import LLTokenizer

from frontend.isolated.worker import CannotStart, Frame, Handler, serve
from frontend.structured.forms import FormError, FormKind
from frontend.structured.grammars import check_grammar, grammar_of

_NICENESS = 5  # answers under way come first


def compiler(hello: Frame) -> Handler:
    """Makes what compiles the forms of one model.

    Raises:
        CannotStart: no grammar can be had with this tokenizer.
    """
    try:
        tokenizer = LLTokenizer(
            hello["tokenizer"], n_vocab=hello["vocab_size"], eos_token=sorted(hello["end_token_ids"])
        )
    except ValueError as error:
        raise CannotStart(str(error)) from error

    def compile_form(job: Frame) -> Frame:
        try:
            grammar = grammar_of(FormKind(job["kind"]), job["text"], job["before"])
            check_grammar(grammar, tokenizer)
        except FormError as error:
            return {"error": str(error)}
        return {"grammar": grammar}

    return compile_form


if __name__ == "__main__":
    serve(compiler, niceness=_NICENESS)
