"""Who may call, and over what: API keys, certificates, and their files read again when they change."""
