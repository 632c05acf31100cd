"""OpenAI's Responses API. Nothing is stored: each request carries its whole conversation.

`bodies` are the requests, `input_items` and `tools` convert them to a conversation, `output_items` makes items and
events, `response` builds the response of one call, `endpoints` has the routes.
"""
