"""Causal language models of text parts for which transformers has none: their decoder with an output head.

The class for images does the same behind its decoder, which its tests compare.
"""

import functools
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers

from engine.model.text_decoders import WITHOUT_A_HEAD


def with_head(config: Any) -> Any:
    """Returns the class of a decoder with an output head; None: the configuration is of none that is known."""
    if config.model_type not in WITHOUT_A_HEAD:
        return None
    mapping: Any = transformers.MODEL_MAPPING
    return _class_of(mapping[type(config)])


@functools.cache
def _class_of(decoder: Any) -> Any:
    pretrained = next(base for base in decoder.__mro__[1:] if base.__name__.endswith("PreTrainedModel"))
    name = f"{decoder.__name__.removesuffix('TextModel')}ForCausalLM"
    return type(name, (_WithHead, pretrained), {"decoder_class": decoder, "__module__": decoder.__module__})


class _WithHead:
    """What such a class adds to its base for pretrained models."""

    base_model_prefix = "model"
    decoder_class: Any
    post_init: Any
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of the other base
        self.model = self.decoder_class(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._factor = getattr(config, "output_multiplier", 1.0)
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, use_cache: bool
    ) -> Any:
        """[1, T] -> logits [1, S, vocab_size] of the tokens to keep."""
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache).last_hidden_state
        logits = self.lm_head(hidden[:, logits_to_keep]) * self._factor
        return SimpleNamespace(logits=logits if self._cap is None else self._cap * torch.tanh(logits / self._cap))
