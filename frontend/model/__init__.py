"""What is known of the model that is served: its tokenizer, chat template, sampling defaults and limits."""
