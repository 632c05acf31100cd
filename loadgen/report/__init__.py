"""What a run says: result.json, the terminal, HTML, pictures."""
