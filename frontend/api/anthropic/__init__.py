"""Anthropic's Messages API over the same HTTP server, queue and answers as OpenAI's.

`bodies` checks a request, `content` and `tools` turn it into a conversation, `job` is one call, `errors` writes errors
in Anthropic's form, `endpoint` has the endpoints.
"""
