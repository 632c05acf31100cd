"""Servers without a model whose times are known exactly: what the load generator measures itself against."""
