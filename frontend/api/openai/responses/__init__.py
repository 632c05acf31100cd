"""OpenAI's Responses API: items in, items out. Nothing is stored, so each request carries its whole conversation.

`bodies` checks a request, `items` and `tools` turn it into a conversation, `output` makes items and events of an
answer, `job` is one call, `endpoint` has the routes.
"""
