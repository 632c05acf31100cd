"""What all HTTP APIs share: the server, request bodies, errors, API keys, event streams and response builders."""
