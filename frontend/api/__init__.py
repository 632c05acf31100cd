"""The public APIs: gRPC, and over HTTP OpenAI's and Anthropic's, which share `http`."""
