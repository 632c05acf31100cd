"""The protocol between frontend and engine."""
