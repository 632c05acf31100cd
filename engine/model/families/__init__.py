"""One module per family of models; `engine.model.architectures` is their registry."""
