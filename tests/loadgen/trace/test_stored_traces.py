"""The real traces against the statistics that were stored with them."""

import gzip
import hashlib
import json
from dataclasses import asdict

import numpy as np
import pytest

from loadgen.trace.oracle import ideal_cached_tokens, ideal_reuse
from loadgen.trace.reader import read_trace
from loadgen.trace.stats import arrival_statistics, statistics
from loadgen.trace.window import dequantize, scale_lengths, tick_s

REQUEST_LOGS = (
    "azure_llm_2023_conv.csv.gz",
    "azure_llm_2023_code.csv.gz",
    "mooncake_fast25_conversation.jsonl.gz",
    "mooncake_arxiv_first1000.jsonl.gz",
)

PRINTED_DIGITS = {"span": 3, "mean_rate": 4, "iat_cv": 3, "zero_iat": 4, "mean": 1, "p": 1}
PRINTED_DIGITS |= {"ideal": 4, "requests_with": 4} | {str(1024 * 2**power): 4 for power in range(6)}


@pytest.fixture(scope="module")
def stored(stored_traces):
    return json.loads((stored_traces / "stats.json").read_text())


def ours(trace):
    """Our statistics under the names of stats.json."""
    stats = asdict(statistics(trace))
    arrivals = stats["arrivals"]
    flat = {
        "rows": arrivals["count"],
        "span_s": arrivals["span_s"],
        "mean_rate_rps": arrivals["mean_rate_rps"],
        "iat_cv": arrivals["gap_cv"],
        "distinct_timestamps": arrivals["distinct_times"],
        "zero_iat_share": arrivals["zero_gap_share"],
        "share_total_tokens_le": {str(context): share for context, share in stats["fitting"].items()},
    }
    for name in ("input_tokens", "output_tokens"):
        lengths = stats[name]
        flat[name] = {key: lengths[key] for key in ("sum", "mean", "min", "max")}
        flat[name] |= {f"p{p}": value for p, value in lengths["percentiles"].items()}
    if stats["reuse"]:
        block_hit, token_reuse, requests_with_hit = stats["reuse"]
        flat["prefix"] = {
            "block_tokens": trace.blocks.block_tokens,
            "blocks": stats["blocks"],
            "unique_blocks": stats["unique_blocks"],
            "ideal_block_hit": block_hit,
            "ideal_token_reuse": token_reuse,
            "requests_with_hit": requests_with_hit,
        }
    return flat


def assert_equal_as_printed(printed, computed, where=""):
    if isinstance(printed, dict):
        assert set(printed) == set(computed), where
        for key, value in printed.items():
            assert_equal_as_printed(value, computed[key], f"{where}.{key}")
    else:
        name = where.split(".")[1] if where.count(".") == 1 else where.rsplit(".", 1)[-1]
        digits = next((digits for start, digits in PRINTED_DIGITS.items() if name.startswith(start)), 0)
        assert abs(computed - printed) <= 0.5 * 10**-digits + 1e-9, f"{where}: {computed}, stored {printed}"


@pytest.mark.parametrize("name", REQUEST_LOGS)
def test_statistics_equal_the_stored_ones_to_their_printed_precision(stored_traces, stored, name):
    # Their dispersion counts the last bin, which the trace fills in part: of Azure's minutes that is 20.55 for 16.13.
    other = ("sha256", "idc", "peak_to_mean")
    printed = {key: value for key, value in stored[name].items() if not key.startswith(other)}
    trace = read_trace(stored_traces / name)
    assert_equal_as_printed(printed, ours(trace))
    assert trace.accounting.read == trace.accounting.kept == printed["rows"]


def test_every_stored_file_is_the_one_that_was_measured(stored_traces, stored):
    assert len(stored) == 6
    for name, printed in stored.items():
        packed = (stored_traces / name).read_bytes()
        assert hashlib.sha256(packed).hexdigest() == printed["sha256_gz"]
        if "sha256_raw" in printed:
            assert hashlib.sha256(gzip.decompress(packed)).hexdigest() == printed["sha256_raw"]


@pytest.mark.parametrize(("name", "reuse"), [(REQUEST_LOGS[2], 0.3736), (REQUEST_LOGS[3], 0.391)])
def test_ideal_reuse_survives_scaled_lengths(stored_traces, name, reuse):
    trace = read_trace(stored_traces / name)
    assert ideal_reuse(trace).token_reuse == pytest.approx(reuse, abs=5e-4)
    small = scale_lengths(trace, 0.125)
    assert small.blocks.block_tokens == 64
    assert ideal_reuse(small).token_reuse == pytest.approx(ideal_reuse(trace).token_reuse, abs=2e-4)
    assert ideal_reuse(small).block_hit == ideal_reuse(trace).block_hit


def test_scaled_conversations_fit_a_small_context(stored_traces):
    trace = read_trace(stored_traces / REQUEST_LOGS[2])
    small = scale_lengths(trace, 0.125)
    assert np.mean(trace.input_tokens + trace.output_tokens <= 4096) == pytest.approx(0.32, abs=0.005)
    assert np.mean(small.input_tokens + small.output_tokens <= 4096) == pytest.approx(0.93, abs=0.005)


def test_cached_tokens_equal_those_of_a_set_of_seen_blocks(stored_traces):
    """Mooncake's ids name whole prefixes, so a set of ids is an infinite cache: another way to the same numbers."""
    trace = read_trace(stored_traces / REQUEST_LOGS[3])
    seen: set[int] = set()
    expected = []
    for index in range(len(trace)):
        blocks = trace.blocks.of(index).tolist()
        found = next((depth for depth, block in enumerate(blocks) if block not in seen), len(blocks))
        expected.append(min(found * 512, int(trace.input_tokens[index])))
        seen.update(blocks)
    assert ideal_cached_tokens(trace).tolist() == expected


@pytest.mark.parametrize(("name", "tick"), [(REQUEST_LOGS[2], 3.0), (REQUEST_LOGS[3], 3.053)])
def test_mooncakes_clock_is_seen_to_tick_and_spread(stored_traces, name, tick):
    trace = read_trace(stored_traces / name)
    assert tick_s(trace) == pytest.approx(tick, abs=0.0025)
    spread = arrival_statistics(dequantize(trace, 0).arrival_s)
    assert arrival_statistics(trace.arrival_s).gap_cv > 3
    assert spread.gap_cv == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", REQUEST_LOGS[:2])
def test_azures_clock_does_not_tick(stored_traces, name):
    assert tick_s(read_trace(stored_traces / name)) is None


def test_a_day_drawn_from_the_traffic_model_has_the_published_figures(stored_traces):
    trace = read_trace(stored_traces / "servegen_deepseek-r1_arrivals.csv.gz")
    stats = statistics(trace)
    assert stats.arrivals.mean_rate_rps == pytest.approx(16.0, abs=0.05)
    for lengths, mean, percentiles in (
        (stats.input_tokens, 1268, (208, 2092, 23423, 57284)),
        (stats.output_tokens, 1527, (792, 3432, 12607, 32768)),
    ):
        assert lengths.mean == pytest.approx(mean, rel=0.01)
        assert [*(lengths.percentiles[p] for p in (50, 90, 99)), lengths.max] == pytest.approx(percentiles, rel=0.01)
    per_ten_minutes = np.bincount((trace.arrival_s // 600).astype(int)) / 600
    assert per_ten_minutes[:144].min() == pytest.approx(4.3, abs=0.1)
    assert per_ten_minutes[:144].max() == pytest.approx(42.5, abs=0.1)
