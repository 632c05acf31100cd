"""Divides a model evenly among ranks: layers, and of each heads, feed-forward network and vocabulary."""

from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.model.checkpoint_part import Span
from engine.model.config import ModelConfig
from engine.model.family import Mixture
from engine.parallel.group import ParallelGroup
from kernels.delta_heads import DeltaHeads


@dataclass(frozen=True, slots=True)
class Sharding:
    """The shard of one rank (arXiv:1909.08053, section 3).

    Attributes:
        heads: query heads.
        kv_heads: key and value heads; if there are fewer than ranks, several ranks hold the same one.
        intermediate: intermediate units of the feed-forward network.
        vocabulary: rows of embedding and output head; the last ranks may hold fewer than the others, or none.
        vocabulary_rows: rows of these matrices in memory, including padding; the same on every rank.
        layers: indices of the layers of the rank's pipeline stage.
        rank, num_ranks: whose shard it is, among the ranks of that stage.
    """

    heads: Span
    kv_heads: Span
    intermediate: Span
    vocabulary: Span
    vocabulary_rows: int
    layers: range
    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def of(cls, config: ModelConfig, group: ParallelGroup) -> "Sharding":
        """Returns the shard of a rank.

        Raises: ConfigError: the model cannot be divided evenly.
        """
        rank, size = group.rank, group.size
        _check_multiple("num_attention_heads", config.num_heads, size)
        _check_multiple("intermediate_size", config.intermediate_size, size)
        for mixture in set(config.traits.mixtures) - {None}:
            assert mixture is not None
            _check_multiple("size of experts", mixture.inner_size, size)
            _check_multiple("size of the shared expert", mixture.shared_size or 0, size)
        for heads in set(config.traits.delta_rules) - {None}:
            assert heads is not None
            _check_multiple("linear_num_key_heads", heads.num_key_heads, size)
            if size > 1 and heads.is_tiled and heads.num_value_heads != heads.num_key_heads:
                raise ConfigError(
                    f"tensor_parallel_size {size} is not supported for GGUF files of {config.architecture} with "
                    f"{heads.num_value_heads} heads of values over {heads.num_key_heads} of keys: use safetensors"
                )
        num_kv_heads = config.num_kv_heads
        if num_kv_heads % size and size % num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads {num_kv_heads} is neither a multiple nor a divisor of tensor_parallel_size {size}"
            )
        layers = _layers_of_stage(config.num_layers, group.stage, group.num_stages)
        if not set(layers) & set(config.attention_layers):
            raise ConfigError(
                f"--pipeline-parallel-size {group.num_stages} gives stage {group.stage} layers {layers.start} to "
                f"{layers.stop - 1}, none of which attends: lower it"
            )
        rows = -(-config.vocab_size // size)
        first_row = min(rank * rows, config.vocab_size)
        return cls(
            heads=_share(config.num_heads, rank, size),
            kv_heads=Span(num_kv_heads, rank * num_kv_heads // size, max(1, num_kv_heads // size)),
            intermediate=_share(config.intermediate_size, rank, size),
            vocabulary=Span(config.vocab_size, first_row, min(rows, config.vocab_size - first_row)),
            vocabulary_rows=rows,
            layers=layers,
            rank=rank,
            num_ranks=size,
        )

    def of_experts(self, mixture: Mixture) -> Span:
        """Returns the intermediate units of each expert."""
        return _share(mixture.inner_size, self.rank, self.num_ranks)

    def of_shared_expert(self, mixture: Mixture) -> Span | None:
        """Returns the intermediate units of the expert that all tokens share, if there is one."""
        size = mixture.shared_size
        return None if size is None else _share(size, self.rank, self.num_ranks)

    def of_delta_heads(self, heads: DeltaHeads) -> tuple[Span, Span]:
        """Returns the rank's key heads of a gated delta rule, and the value heads that share them."""
        keys, values = (
            _share(number, self.rank, self.num_ranks) for number in (heads.num_key_heads, heads.num_value_heads)
        )
        return keys, values

    def own_delta_heads(self, heads: DeltaHeads) -> DeltaHeads:
        """Returns the sizes of the rank's part of a gated delta rule."""
        keys, values = self.of_delta_heads(heads)
        return heads._replace(num_key_heads=keys.size, num_value_heads=values.size)

    def _own_mixture(self, mixture: Mixture) -> Mixture:
        """Returns the sizes of the rank's part of a mixture of experts."""
        shared = self.of_shared_expert(mixture)
        return replace(
            mixture, inner_size=self.of_experts(mixture).size, shared_size=None if shared is None else shared.size
        )

    def config_of(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration of the shard: its layers, heads and intermediate units; the whole vocabulary."""
        traits, layers = config.traits, slice(self.layers.start, self.layers.stop)
        return replace(
            config,
            num_layers=len(self.layers),
            num_heads=self.heads.size,
            num_kv_heads=self.kv_heads.size,
            intermediate_size=self.intermediate.size,
            layer_groups=config.layer_groups[layers],
            traits=replace(
                traits,
                mixtures=tuple(mixture and self._own_mixture(mixture) for mixture in traits.mixtures[layers]),
                delta_rules=tuple(heads and self.own_delta_heads(heads) for heads in traits.delta_rules[layers]),
                ropes=traits.ropes[layers],
                sliding_windows=traits.sliding_windows[layers],
            ),
        )


def _check_multiple(name: str, number: int, size: int) -> None:
    if number % size:
        raise ConfigError(f"{name} {number} is not a multiple of tensor_parallel_size {size}")


def _layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Returns the layers of a stage: as many as another one has, or one more.

    The last stages have the one more, since the first has embedding and output head.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} is more than the {num_layers} layers of the model: lower it"
        )
    least, num_longer = divmod(num_layers, num_stages)
    starts = [index * least + max(0, index - (num_stages - num_longer)) for index in (stage, stage + 1)]
    return range(*starts)


def _share(total: int, rank: int, size: int) -> Span:
    return Span(total, rank * (total // size), total // size)
