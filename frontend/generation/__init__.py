"""From a checked request to its answer: admission, prompts, submission to an engine, text of the answer."""
