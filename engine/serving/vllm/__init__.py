"""The engine behind gateways that speak vLLM's gRPC API: `vllm.grpc.engine.VllmEngine` of the package smg-grpc-proto.

    service.py     the methods
    convert.py     a request to submissions; unsupported fields are refused by name
    local_session.py   a frontend's session without a stream
    call.py        one Generate call and its answers
    answer.py      outputs of one answer until they are sent
    stop_texts.py  stop texts, matched on the bytes of tokens
    messages.py    outputs to responses
    description.py the model, the server and its load
    cache_log.py   what the prefix cache holds, for subscribers

A call submits what a frontend would submit, to the same scheduler through the same checks (`engine.serving.session`).
Nothing else of the engine imports this package: it needs the extra `engines`.
"""
