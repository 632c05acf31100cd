"""llama.cpp as a peer: its environment, its worker process, and what they are as systems under test."""
