"""Structured output: allowed token ids, forbidden sequences and grammars, as bit masks over the vocabulary.

Pure: no torch, sockets or scheduler.
"""
