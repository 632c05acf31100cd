"""Structured output: compiles the constraint on an answer to one grammar, by `chairlift.service.structured`.

    trial.py           draws a few answers: what compiles may still be too much to run
    worker.py      the process that compiles one grammar at a time, within limits; see `frontend.text.isolated`
    compiler.py    interface for requests: queue, cache, workers

Only the worker imports llguidance: a grammar that crashes it ends one worker process.
"""
