"""Converts a request's tokens to answers: text, stop texts, reasoning and tool calls, several answers, prompt echo."""
