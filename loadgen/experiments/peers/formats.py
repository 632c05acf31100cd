"""Number formats of the comparison: what is stored, who the peer is, and how each side is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How weights are stored on both sides.

    Attributes:
        name: on the command line.
        checkpoint_dtype: in which the checkpoint is saved.
        engine_flags: of Chairlift, beside those of every format.
        gguf: whether the model is a GGUF file, which llama.cpp and Chairlift read; otherwise OpenVINO converts the
            checkpoint.
        is_exact: whether ids must be those of `transformers` in fp32 up to near-ties; otherwise products or weights are
            rounded, and the agreement is printed.
        alone_dtype: in which `transformers` answers one request alone; None: it does not run.
    """

    name: str
    checkpoint_dtype: str = "float32"
    engine_flags: tuple[str, ...] = ()
    gguf: bool = False
    is_exact: bool = False
    alone_dtype: str | None = None

    @property
    def gguf_type(self) -> str:
        """Type of the GGUF file, as llama.cpp calls it."""
        return self.name.removesuffix("-exact")

    @property
    def stored(self) -> str:
        """Type of the GGUF file that is written before llama.cpp quantises it; the same: it is not quantised."""
        return self.name if self.name in ("F32", "F16", "BF16") else "BF16"


_INT8_INPUTS = ("--quantization", "int8", "--kv-cache-dtype", "bfloat16")

FORMATS: Mapping[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        NumberFormat("fp32", engine_flags=("--dtype", "float32"), is_exact=True, alone_dtype="float32"),
        NumberFormat("int8", engine_flags=("--quantization", "int8", "--kv-cache-dtype", "int8")),
        NumberFormat("bf16", "bfloat16", ("--dtype", "bfloat16"), alone_dtype="bfloat16"),
        *(NumberFormat(name, gguf=True) for name in ("F16", "BF16")),
        *(NumberFormat(name, engine_flags=_INT8_INPUTS, gguf=True) for name in ("Q8_0", "Q4_K_M")),
        *(NumberFormat(f"{name}-exact", gguf=True) for name in ("Q8_0", "Q4_K_M")),
    )
}
DEFAULT_FORMATS = ("fp32", "int8", "bf16", "Q8_0", "Q4_K_M")


class Terms(NamedTuple):
    """What both sides get alike.

    Attributes:
        step_tokens: token budget of a step.
        num_slots: requests that are computed at once.
        slot_tokens: the most tokens that a request has, prompt and answer.
    """

    step_tokens: int
    num_slots: int
    slot_tokens: int
