"""Weights of a checkpoint as they are loaded, and the memory that tensors take meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.model.architectures import decoder_traits
from engine.model.checkpoint_part import CheckpointPart
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.dummy_weights import RandomWeights
from engine.model.weights import WeightsReader
from engine.parallel.group import SINGLE_RANK, ParallelGroup
from kernels.families import reference_ops


def loaded_parts(
    path: Path,
    *,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
    seed: int = 0,
    group: ParallelGroup = SINGLE_RANK,
) -> dict[str, CheckpointPart]:
    """Returns name -> part of each weight as loaded in float32, before it is packed."""
    config = ModelConfig.from_dir(path)
    model = Decoder(
        config,
        decoder_traits(config),
        reference_ops(),
        max_positions=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=group,
    )
    parts = {
        name: part._replace(tensor=torch.empty_like(part.tensor, device="cpu"))
        for name, part in model.checkpoint_parts().items()
    }
    fill = RandomWeights(parts, seed).fill if load_format == "dummy" else WeightsReader(path, parts).fill
    fill(parts)
    return parts


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures memory of tensors made inside the context, on any device, `meta` included.

    Attributes:
        bytes, peak_bytes: live storages now, and the most at any time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes(self) -> int:
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}  # type: ignore[no-untyped-call]
        return sum(num_bytes for _, num_bytes in self._storages.values())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._storages[storage._cdata] = reference, storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return out
