"""OpenAI's API over HTTP: completions, chat, responses, models, and what vLLM's users expect beside them.

A door like the gRPC service's: bodies become `GenerationSpec`s, answers become JSON. Everything between is shared, so
admission, limits, cancelling and draining are the same for both.
"""
