"""The process that compiles grammars (`python -m frontend.text.structured.worker`); see `isolated/worker.py`.

-> {"tokenizer": ..., "vocab_size": ..., "end_token_ids": [...]}      <- {}
-> {"kind": ..., "text": ..., "before": ...}                          <- {"grammar": ...}, again and again
"""

from llguidance import LLTokenizer

from frontend.text.isolated.worker import CannotStart, Frame, Handler, serve
from frontend.text.structured.grammars import grammar_of, parts_of
from frontend.text.structured.output_format import FormError, FormKind
from frontend.text.structured.trial import Trial

_NICENESS = 5  # running answers have priority


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

    trial = Trial(tokenizer)

    def compile_form(job: Frame) -> Frame:
        try:
            return {"grammar": _tried_grammar(FormKind(job["kind"]), job["text"], job["before"], trial)}
        except FormError as error:
            return {"error": str(error)}

    return compile_form


def _tried_grammar(kind: FormKind, text: str, before: str, trial: Trial) -> str:
    grammar = grammar_of(kind, text, before)
    try:
        trial.run(grammar)
    except FormError:
        for place, part in parts_of(kind, text):  # which of several schemas it is
            try:
                trial.run(part)
            except FormError as error:
                raise FormError(f"{place}: {error}") from None
        raise
    return grammar


if __name__ == "__main__":
    serve(compiler, niceness=_NICENESS)
