"""Which rank holds which part of a model, and on which machine it runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLayout:
    """A model in `num_stages` pipeline stages of consecutive layers (arXiv:1811.06965), each divided among
    `tensor_size` ranks (arXiv:1909.08053), on `num_nodes` machines.

    The ranks of a stage follow each other, and a machine has whole stages: only the pipeline crosses the network.
    """

    tensor_size: int = 1
    num_stages: int = 1
    num_nodes: int = 1

    def __str__(self) -> str:
        """The flags that ask for it."""
        flags = {"--tensor-parallel-size": self.tensor_size, "--pipeline-parallel-size": self.num_stages}
        return " ".join(f"{flag} {number}" for flag, number in flags.items() if number > 1) or "one rank"

    @property
    def num_ranks(self) -> int:
        """Ranks on all machines."""
        return self.tensor_size * self.num_stages

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.num_ranks // self.num_nodes

    def ranks_of(self, node: int) -> range:
        """Ranks on a machine."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def stage_of(self, rank: int) -> int:
        """Stage of a rank."""
        return rank // self.tensor_size

    def tensor_rank_of(self, rank: int) -> int:
        """Rank among those of its stage."""
        return rank % self.tensor_size

    def stages_of(self, node: int) -> range:
        """Stages on a machine."""
        stages_per_node = self.num_stages // self.num_nodes
        return range(node * stages_per_node, (node + 1) * stages_per_node)


ONE_RANK = RankLayout()
"""A model that is not divided."""
