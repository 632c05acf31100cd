"""Structured output: compiles the constraint on an answer to one grammar for llguidance.

    output_constraint.py   constraints that a request can set
    grammars.py    constraints to grammars; runs only in a worker, as do these:
    schema_rules.py    JSON Schemas in keywords that llguidance knows; schema_walk.py finds their parts
    closed_objects.py  objects without members that the schema does not name
    unique_items.py    arrays of distinct items
    trial.py           draws a few answers: what compiles may still be too much to run
    worker.py      the process that compiles one grammar at a time, within limits; see `frontend.text.isolated`
    compiler.py    interface for requests: queue, cache, workers

Only the worker imports llguidance: a grammar that crashes it ends one worker process.
"""
