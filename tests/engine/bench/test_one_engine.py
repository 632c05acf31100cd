"""Each benchmark of variants of one engine runs with --quick and writes its samples."""

import json
from pathlib import Path

import pytest

from engine.bench.__main__ import main
from kernels.cpu.cpu_features import cpu_features

CHUNKS = {"chunk 16", "chunk 32", "unchunked"}


@pytest.mark.parametrize(
    ("name", "ids", "figure", "variants"),
    [
        ("C5", {"C5", "C6"}, "ttft_s", CHUNKS | {"alone"}),
        ("C5", {"C5", "C6"}, "worst_gap_s", CHUNKS),
        ("C7", {"C7"}, "seconds_of_chunks", {"chunk alone", "chunk and decodes"}),
        ("C8", {"C8"}, "ttft_s", {"cold", "warm"}),
        ("C9", {"C9"}, "outside_runner_s", {"on", "off"}),
        ("decode", {"C13", "C14"}, "median_step_s", {"all", "one"}),
        ("solo", {"solo"}, "tpot_s", {"Chairlift", "transformers"}),
        ("invariance-cost", {"invariance"}, "wall_s", {"fast", "batch-invariant", "fast again"}),
        (
            "adapters",
            {"adapters"},
            "8 rows",
            {"without --lora", "no adapter", "one adapter", "8 adapters"},
        ),
        (
            "experts",
            {"experts"},
            "4 rows",
            {"Chairlift", "--model-impl transformers", "a dense model of the active size", "transformers"},
        ),
        (
            "weights-dtype",
            {"weights-dtype"},
            "4 rows",
            {"Chairlift, float32", "Chairlift, auto", "Chairlift, bfloat16", "transformers, bfloat16"},
        ),
        (
            "attention",
            {"C12"},
            "seconds",
            {"read", *(f"32 x {lens}, {kind} KV" for lens in ("32", "1..64") for kind in ("fp32", "int8"))},
        ),
    ],
)
def test_quick_run_writes_its_samples(
    name: str, ids: set[str], figure: str, variants: set[str], tmp_path: Path
) -> None:
    assert main([name, "--quick", "--rounds", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert {result["benchmark_id"] for result in report["results"]} == ids
    samples = report["raw"][figure]
    assert {variant: len(values) for variant, values in samples.items()} == dict.fromkeys(variants, 2)
    assert all(value > 0 for values in samples.values() for value in values)


def test_quality_writes_every_scored_token(tmp_path: Path) -> None:
    assert main(["quality", "--quick", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    raw = json.loads(path.read_text())["raw"]
    in_bf16 = {"bf16 products"} if cpu_features().bf16 else set()
    assert set(raw) == {"fp32", "int8 weights", "int8 weights and KV", "int4 weights"} | in_bf16
    assert len({len(mode["logprobs"]) for mode in raw.values()}) == 1
    assert raw["fp32"]["logprobs"] != raw["int8 weights"]["logprobs"] != raw["int8 weights and KV"]["logprobs"]
    assert raw["int4 weights"]["logprobs"] not in [raw[name]["logprobs"] for name in raw if name != "int4 weights"]
