"""Prompts: token ids by a counter PRF, or words for servers that take no ids."""
