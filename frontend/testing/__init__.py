"""For tests: an engine without a model, its tokenizer, and random requests."""
