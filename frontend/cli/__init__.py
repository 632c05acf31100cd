"""The `chairlift` script: one module per command, each with `main(argv) -> exit status`."""
