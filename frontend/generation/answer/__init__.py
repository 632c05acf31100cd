"""From the tokens of a request to what its client gets: text, stop texts, parts, several answers, the prompt echoed."""
