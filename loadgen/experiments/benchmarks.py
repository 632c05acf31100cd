"""The experiments with whole servers. A module is imported when its experiment runs."""

from chairlift.bench.benchmark import Benchmark

BENCHMARKS = (
    Benchmark(
        "transformers-generate",
        ("C3", "C2"),
        "the engine against transformers' generate, fp32 and int8",
        "loadgen.experiments.peers.transformers:against_generate",
        has_cpu_floors=False,
    ),
    Benchmark(
        "transformers-generate-batch",
        ("C4",),
        "the engine against transformers' continuous batching, fp32 and int8",
        "loadgen.experiments.peers.transformers:against_continuous",
        has_cpu_floors=False,
    ),
    Benchmark(
        "frontend-cost",
        ("C17",),
        "delivered tokens per second and core of the frontend",
        "loadgen.experiments.wire.frontend_cost",
        has_cpu_floors=False,
    ),
    Benchmark(
        "wire-latency",
        ("C18",),
        "latency that gRPC and detokenization add to a token",
        "loadgen.experiments.wire.latency",
        has_cpu_floors=False,
    ),
    Benchmark(
        "wire-throughput",
        ("C19",),
        "throughput through the whole pair against the engine in process",
        "loadgen.experiments.wire.throughput",
        has_cpu_floors=False,
    ),
    Benchmark(
        "failover",
        ("R1", "R2"),
        "the pause that kill -9 of an engine costs, and every token",
        "loadgen.experiments.failover",
        has_cpu_floors=False,
    ),
    Benchmark(
        "endpoints",
        (),
        "tokens through gRPC and HTTP: workers, uvloop, coalescing",
        "loadgen.experiments.endpoints",
        has_cpu_floors=False,
    ),
    Benchmark(
        "gateways",
        (),
        "Chairlift's frontend and SMG before the same engine: CPU per token and request, time to the first token",
        "loadgen.experiments.gateways.comparison",
        has_cpu_floors=False,
    ),
    Benchmark(
        "peers",
        (),
        "the whole pair over gRPC against OpenVINO GenAI and llama.cpp, in five number formats",
        "loadgen.experiments.peers.comparison",
        has_cpu_floors=False,
    ),
    Benchmark(
        "transformers-batches",
        (),
        "the pair over gRPC against transformers' generate, batches of 4 to 128",
        "loadgen.experiments.peers.padded_batches",
        has_cpu_floors=False,
    ),
    Benchmark(
        "twin",
        (),
        "the twin of chairlift simulate against the real pair, at 1, 2 and 3 times its capacity",
        "loadgen.experiments.latency.twin",
        has_cpu_floors=False,
    ),
    Benchmark(
        "governor",
        (),
        "gaps of streams beside long prompts: the governor against a fixed token budget",
        "loadgen.experiments.latency.governor",
        has_cpu_floors=False,
    ),
)
