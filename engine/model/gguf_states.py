"""Layers of GGUF files that keep a state as Mamba 2 does (arXiv:2405.21060): their metadata and tensors."""

from typing import NamedTuple

from engine.model.gguf_metadata import GgufMetadata

MAMBA = {
    "in": "in_proj",
    "conv1d": "conv1d",
    "dt.bias": "dt_bias",
    "a": "A_log",
    "d": "D",
    "norm": "norm",
    "out": "out_proj",
}
"""Names of modules and tensors behind `ssm_` -> names in a mixer of the decoder."""


class MambaSizes(NamedTuple):
    """Sizes of a mixer.

    Attributes:
        inner: of what its heads compute together.
        num_heads: number of heads.
        num_groups: number of groups of heads that share inputs and outputs of the state.
        state_size: of a head, for each of its values.
        width: tokens of a convolution.
    """

    inner: int
    num_heads: int
    num_groups: int
    state_size: int
    width: int


def mamba(metadata: GgufMetadata) -> MambaSizes:
    """Returns the sizes of a file.

    Raises: CheckpointError: one is missing, or heads do not divide what they compute.
    """
    inner, heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    if inner % heads:
        raise metadata.error("ssm.inner_size", f"is {inner}, not a multiple of the {heads} heads of ssm.time_step_rank")
    return MambaSizes(
        inner,
        heads,
        metadata.integer("ssm.group_count", 1),
        metadata.integer("ssm.state_size"),
        metadata.integer("ssm.conv_kernel"),
    )
