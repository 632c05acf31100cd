"""Engines of other projects, behind the engine protocol of Chairlift.

`attach.py` stands in for the Attach stream of an engine: it takes the frontend's commands, runs one Generate call per
request, and turns the responses into the events of docs/protocol.md. Session, credits, failover, metrics and errors
are therefore the same for all engines. `dialect.py` is what the protos have in common; `vllm.py`, `sglang.py` and
`trtllm.py` map one of them each.
"""
