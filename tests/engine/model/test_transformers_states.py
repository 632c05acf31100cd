"""Layers with state in ragged batches, against each request alone; and how such layers are found and checked."""

import random

import pytest
import torch

from engine.errors import CheckpointError
from engine.model.transformers_states import RequestStates, StatefulLayer, StateProbe
from kernels.metadata import Span

NUM_SLOTS, WIDTH = 5, 8


class RunningSum(torch.nn.Module):
    """Adds to each token those before it in its request.

    Args:
        forgets: when it ignores its state: "never", "of many" (tokens at once), "always".
    """

    def __init__(self, forgets: str = "never") -> None:
        super().__init__()
        self.layer_idx = 3
        self.forgets = forgets
        self.proj = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = torch.nn.Linear(WIDTH, WIDTH)
        torch.nn.init.eye_(self.proj.weight)
        self.batches: list[tuple[int, ...]] = []

    def forward(self, hidden_states, cache=None, positions=None):
        assert hidden_states.shape[:2] == positions.shape
        self.batches.append(tuple(positions.shape))
        sums = self.proj(hidden_states).cumsum(dim=1)
        state = cache.get_conv_state(self.layer_idx)
        forgets = self.forgets == "always" or (self.forgets == "of many" and hidden_states.shape[1] > 1)
        if state is not None and not forgets:
            sums = sums + state.transpose(1, 2)
        cache.update_conv_state(sums[:, -1:].transpose(1, 2), self.layer_idx)
        return sums


class Model(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, None, positions=torch.zeros(x.shape[:2]))


def ready(layer: RunningSum) -> tuple[Model, RequestStates]:
    """Returns a model with a layer whose states are allocated."""
    model = Model(layer)
    states = RequestStates(model, [StatefulLayer("layer", (torch.Size((WIDTH, 1)),))])
    states.begin([Span(0, token, token + 1, is_first=True) for token in range(2)], torch.device("cpu"))
    model(torch.randn(1, 2, WIDTH))
    states.check()
    states.allocate(NUM_SLOTS, torch.device("cpu"))
    return model, states


@pytest.mark.parametrize("forgets", ["never", "of many"])
@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_results_are_those_of_each_request_alone(seed: int, forgets: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, states = ready(RunningSum(forgets))
    totals: dict[int, torch.Tensor] = {}  # by slot: of the request that has it
    for _ in range(60):
        spans, first = [], 0
        for slot in rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS)):
            num_tokens = rng.choice([1, 1, 1, 2, 7])
            is_first = slot not in totals or rng.random() < 0.1  # another request has the slot
            spans.append(Span(slot, first, first + num_tokens, is_first))
            first += num_tokens
        x = torch.randn(1, first, WIDTH)
        states.begin(spans, torch.device("cpu"))
        result = model(x)
        for span in spans:
            before = torch.zeros(WIDTH) if span.is_first else totals[span.slot]
            wanted = before + x[0, span.first : span.end].cumsum(dim=0)
            torch.testing.assert_close(result[0, span.first : span.end], wanted, atol=1e-4, rtol=1e-4)
            totals[span.slot] = wanted[-1]


@torch.inference_mode()
def test_rows_of_one_token_are_computed_together() -> None:
    layer = RunningSum()
    model, states = ready(layer)
    layer.batches.clear()
    states.begin(
        [
            Span(2, 0, 1, is_first=False),
            Span(0, 1, 2, is_first=False),
            Span(4, 2, 3, is_first=True),
            Span(1, 3, 6, is_first=False),
        ],
        torch.device("cpu"),
    )
    model(torch.randn(1, 6, WIDTH))
    assert sorted(layer.batches) == [(1, 1), (1, 3), (2, 1)]


@torch.inference_mode()
def test_layers_that_continue_by_single_tokens_get_them_so(caplog: pytest.LogCaptureFixture) -> None:
    layer = RunningSum("of many")
    with caplog.at_level("INFO"):
        model, states = ready(layer)
    assert "one by one" in caplog.text
    layer.batches.clear()
    states.begin([Span(1, 0, 3, is_first=True), Span(0, 3, 6, is_first=False)], torch.device("cpu"))
    model(torch.randn(1, 6, WIDTH))
    assert sorted(layer.batches) == [(1, 1), (1, 1), (1, 1), (1, 3)]


@torch.inference_mode()
def test_layers_that_do_not_continue_are_refused() -> None:
    with pytest.raises(CheckpointError, match="RunningSum does not continue a request from the state that it keeps"):
        ready(RunningSum("always"))


@torch.inference_mode()
def test_linear_layers_that_are_never_called_are_named() -> None:
    layer = RunningSum()
    _, states = ready(layer)
    assert states.uncalled == {layer.unused}


def test_a_probe_finds_shapes_without_values() -> None:
    with torch.device("meta"):
        model = Model(RunningSum())
        probe = StateProbe(model)
        model(torch.empty(1, 2, WIDTH))
    assert probe.layers() == (StatefulLayer("layer", (torch.Size((WIDTH, 1)),)),)
    assert probe.layers()[0].num_bytes == 4 * WIDTH


def test_a_layer_that_attends_and_keeps_state_is_refused() -> None:
    class Attending(RunningSum):
        def forward(self, hidden_states, cache=None, positions=None):
            probe.note_attention()
            return super().forward(hidden_states, cache, positions)

    with torch.device("meta"):
        model = Model(Attending())
        probe = StateProbe(model)
        model(torch.empty(1, 2, WIDTH))
    with pytest.raises(CheckpointError, match="layer both attends and keeps state"):
        probe.layers()
