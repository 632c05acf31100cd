"""Fixtures that read metrics from the text that a scraper gets."""

from collections.abc import Callable
from typing import Any

import pytest

from frontend.generation.admission import Admission
from frontend.observability.metrics import Metrics

Scrape = Callable[..., dict[Any, float]]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("chairlift", Admission(max_requests=8, max_tokens=100))


@pytest.fixture
def ended(scrape: Scrape) -> Callable[[Any], dict[str, int]]:
    """ended(pair) returns the outcomes counted so far; checks that they sum up to the requests received."""

    def read(pair: Any) -> dict[str, int]:
        ends = scrape(pair.app.metrics, "chairlift:request_success_total", "finished_reason")
        refused = scrape(pair.app.metrics, "chairlift:requests_refused_total", "reason")
        received = scrape(pair.app.metrics, "chairlift:requests_received_total")
        assert received == sum(ends.values()) + sum(refused.values()) + pair.app.calls.num_active
        return {word: int(count) for word, count in (ends | refused).items() if count}

    return read


@pytest.fixture
def billed(scrape: Scrape) -> Callable[[Any], tuple[float, float]]:
    """billed(pair) returns the prompt and output tokens billed so far; checks that all metrics agree on them."""

    def read(pair: Any) -> tuple[float, float]:
        metrics = pair.app.metrics
        prompt = scrape(metrics, "chairlift:prompt_tokens_total")
        output = scrape(metrics, "chairlift:generation_tokens_total")
        if not pair.app.calls.num_active:
            assert scrape(metrics, "chairlift:request_prompt_tokens_sum") == prompt
            assert scrape(metrics, "chairlift:request_generation_tokens_sum") == output
        return prompt, output

    return read
