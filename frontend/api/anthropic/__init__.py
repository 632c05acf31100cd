"""Anthropic's Messages API.

`bodies` are the requests, `input_messages` and `tools` convert them to a conversation, `message_response` builds the
response of one call, `errors` formats errors, `endpoints` has the endpoints.
"""
