"""Requests of clients: checked and converted, with defaults filled in."""
