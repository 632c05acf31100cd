"""OpenAI's API over HTTP: completions, chat, responses, models, and what vLLM's users expect beside them.

Bodies become `GenerationSpec`s, answers become JSON, as in the gRPC service. Everything between is shared, so
admission, limits, cancelling and draining are the same for both.
"""
