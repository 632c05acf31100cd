"""Structured output: converts the constraint on an answer to a grammar for llguidance.

    output_constraint.py   constraints that a request can set
    grammar_tokenizer.py   the model's tokenizer, as llguidance reads it
    parser_limits.py   limits of llguidance on the work of a grammar
    grammars.py        constraints to grammars, in llguidance's JSON format
    schema_rules.py    JSON Schemas in keywords that llguidance knows; schema_walk.py finds their parts
    number_rules.py    numbers that llguidance computes exactly
    closed_objects.py  objects without members that the schema does not name
    unique_items.py    arrays of distinct items

The frontend runs `grammars` in a process that may be killed, the engine on a thread for requests of its vLLM API.
"""
