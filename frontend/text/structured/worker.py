"""The process that compiles grammars (`python -m frontend.text.structured.worker`); see `isolated/worker.py`.

-> {"tokenizer": ..., "vocab_size": ..., "end_token_ids": [...]}      <- {}
-> {"kind": ..., "text": ..., "before": ...}                          <- {"grammar": ...}, again and again
"""

from chairlift.service.structured.grammar_tokenizer import grammar_tokenizer
from chairlift.service.structured.grammars import grammar_of, parts_of
from chairlift.service.structured.output_constraint import ConstraintError, ConstraintKind
from frontend.text.isolated.worker import CannotStart, Frame, Handler, serve
from frontend.text.structured.trial import Trial

_NICENESS = 5  # running answers have priority


def compiler(hello: Frame) -> Handler:
    """Returns the function that compiles the constraints of one model.

    Raises:
        CannotStart: the tokenizer cannot be used for grammars.
    """
    try:
        tokenizer = grammar_tokenizer(hello["tokenizer"], hello["vocab_size"], hello["end_token_ids"])
    except ValueError as error:
        raise CannotStart(str(error)) from error

    trial = Trial(tokenizer)

    def compile_constraint(job: Frame) -> Frame:
        try:
            return {"grammar": _tried_grammar(ConstraintKind(job["kind"]), job["text"], job["before"], trial)}
        except ConstraintError as error:
            return {"error": str(error)}

    return compile_constraint


def _tried_grammar(kind: ConstraintKind, text: str, before: str, trial: Trial) -> str:
    grammar = grammar_of(kind, text, before)
    try:
        trial.run(grammar)
    except ConstraintError:
        for place, part in parts_of(kind, text):  # which of several schemas it is
            try:
                trial.run(part)
            except ConstraintError as error:
                raise ConstraintError(f"{place}: {error}") from None
        raise
    return grammar


if __name__ == "__main__":
    serve(compiler, niceness=_NICENESS)
