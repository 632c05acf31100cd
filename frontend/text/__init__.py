"""Text and token ids: tokenizer, detokenizer, chat template, structured output and the parts of chat answers."""
