"""The pair and transformers at several batch sizes: the figures of each, and a picture of all."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.bench.alternate import Samples
from chairlift.bench.benchmark import BenchmarkError
from loadgen.experiments.peers.padding_waste import Waste

TRANSFORMERS, PAIR = "transformers", "Chairlift"
"""The systems under test."""


@dataclass(frozen=True, slots=True)
class Size:
    """Results at one batch size.

    Attributes:
        rows: of a batch, and slots of the pair.
        samples: seconds per round, by system.
        num_output_tokens: of a round.
        waste: of the padded batches.
        notes: how the ids agree, by system.
    """

    rows: int
    samples: Samples
    num_output_tokens: int
    waste: Waste
    notes: dict[str, str]

    def tokens_per_s(self, name: str) -> float:
        """Output tokens per second of the best round."""
        return self.num_output_tokens / self.samples.best(name)


def draw(sizes: Sequence[Size], title: str, path: Path) -> None:
    """Draws tokens per second by the rows of a batch, and what the padded batches were made of.

    Args:
        sizes: in the order of the axis.
        title: above both.
        path: .svg or .png; overwritten.
    Raises: BenchmarkError: matplotlib is missing, or knows no such kind of file.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchmarkError(f"--draw needs matplotlib: pip install 'chairlift[loadgen]' ({error})") from error
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    speed, padding = figure.subplots(1, 2)
    names = [str(size.rows) for size in sizes]
    for name, colour in ((PAIR, "#2f6db3"), (TRANSFORMERS, "#c8553d")):
        values = [size.tokens_per_s(name) for size in sizes]
        speed.plot(names, values, "o-", color=colour, linewidth=1.8, label=name)
        for place, value in enumerate(values):
            speed.annotate(f"{value:,.0f}", (place, value), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    speed.set(xlabel="rows of a batch, slots of the pair", ylabel="output tokens per second", ylim=(0, None))
    speed.margins(y=0.12)
    speed.legend(frameon=False, loc="upper left")
    begins = [0.0] * len(sizes)
    for label, colour, field in (
        ("requested", "#2f9d8f", "useful"),
        ("rows after the end of their answer", "#e0a03c", "idle_rows"),
        ("padding in front of prompts", "#9a9ac8", "prompt_padding"),
    ):
        shares = [100 * getattr(size.waste, field) / size.waste.computed for size in sizes]
        bars = padding.bar(names, shares, 0.7, bottom=begins, color=colour, label=label)
        padding.bar_label(bars, [f"{s:.0f} %" if s > 5 else "" for s in shares], label_type="center", fontsize=9)
        begins = [begin + share for begin, share in zip(begins, shares, strict=True)]
    padding.set(xlabel="rows of a padded batch", ylabel="% of the tokens computed", ylim=(0, 100))
    figure.legend(*padding.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    for axes in (speed, padding):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#d0d0d0", linewidth=0.6)
    figure.suptitle(title, x=0.01, ha="left")
    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(path)
    except ValueError as error:
        raise BenchmarkError(f"--draw {path}: {error}") from error
