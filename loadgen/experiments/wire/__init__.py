"""The pair as its users meet it: an engine process, a frontend process and a gRPC client, timed from the client's end.

The frontend is a command here, never an import.
"""
