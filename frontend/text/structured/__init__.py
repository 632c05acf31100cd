"""Structured output: what a request wants its answer to look like becomes one grammar, as llguidance takes it.

    forms.py       what can be asked for
    grammars.py    forms to grammars; runs in a worker alone, as do these:
    schema_rules.py    JSON Schemas in keywords that llguidance knows; schema_walk.py finds their parts
    closed_objects.py  objects without members that the schema does not name
    unique_items.py    arrays of distinct items
    trial.py           draws a few answers: what compiles may still be too much to run
    worker.py      the process that compiles one grammar at a time, within limits; see `frontend.text.isolated`
    compiler.py    what requests ask: queue, cache, workers

llguidance is imported in the worker only: a grammar that it cannot take ends the worker, and nobody else.
"""
