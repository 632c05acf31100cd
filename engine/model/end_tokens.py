"""The tokens that end an answer: several files of a checkpoint name them, and often different ones."""

from engine.model.checkpoint import Checkpoint
from engine.model.config_fields import ConfigFields


def end_token_ids(
    checkpoint: Checkpoint, stated: ConfigFields, fields: ConfigFields, vocab_size: int
) -> frozenset[int]:
    """Returns the ids of config.json, generation_config.json and the tokenizer's `eos_token`.

    vLLM and llama.cpp end answers at the last one too. A checkpoint tuned with another chat template often names the
    end of a turn only there.

    Args:
        checkpoint: the checkpoint.
        stated: config.json.
        fields: the same with the defaults of its class, which count without a generation_config.json.
        vocab_size: rows of the output head; a tokenizer may have more tokens.

    Raises: CheckpointError: a file cannot be read, or an `eos_token_id` is no id.
    """
    generation = checkpoint.generation_config()
    if generation is None:
        ids = fields.token_ids("eos_token_id")
    else:
        ids = stated.token_ids("eos_token_id") | generation.token_ids("eos_token_id")
    named = checkpoint.named_end_token_id()
    return ids if named is None or named >= vocab_size else ids | {named}
