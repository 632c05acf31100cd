"""The engine's gRPC side: streams of frontends, their requests and answers, and the threads around the step loop."""
