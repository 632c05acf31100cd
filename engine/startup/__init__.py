"""From a configuration to parts that serve: device, memory, model, runner, and the start's progress."""
