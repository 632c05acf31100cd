"""The benchmarks of the engine. A module is imported when its benchmark runs, since others may lack its packages."""

from chairlift.bench.benchmark import Benchmark

BENCHMARKS = (
    Benchmark(
        "chunked-prefill",
        ("C5", "C6"),
        "a long prompt beside decoding requests, chunked or not",
        "engine.bench.chunked_prefill",
    ),
    Benchmark("piggyback", ("C7",), "decoding rows in the step of a prompt chunk", "engine.bench.piggyback"),
    Benchmark("prefix-hit", ("C8",), "first token of a prompt with a cached prefix", "engine.bench.prefix_hit"),
    Benchmark("prefix-cache-cost", ("C9",), "cost of the prefix cache without hits", "engine.bench.prefix_cache_cost"),
    Benchmark(
        "kv-cache-use", ("C11",), "KV slots wasted by paging, and sequences admitted", "engine.bench.kv_cache_use"
    ),
    Benchmark(
        "attention", ("C12",), "paged attention's share of the read bandwidth", "engine.bench.attention_bandwidth"
    ),
    Benchmark(
        "decode", ("C13", "C14"), "decode steps against the model time; 32 streams against 1", "engine.bench.decode"
    ),
    Benchmark("step-overhead", ("C16",), "scheduler and packing without a model", "engine.bench.step_overhead"),
    Benchmark(
        "launch-overhead",
        (),
        "CPU time of kernel launches per layer, without a GPU",
        "engine.bench.launch_overhead",
        has_cpu_floors=False,
    ),
    Benchmark(
        "gpu-decode",
        ("G1", "G2", "G3", "G13", "G14"),
        "on a GPU: decode and prefill steps as fractions of their floor; idle time",
        "engine.bench.gpu_decode",
        has_cpu_floors=False,
    ),
    Benchmark(
        "gpu-mix",
        ("G4", "G5", "G6", "G7"),
        "on a GPU: tokens/s with all slots taken, continuous and static, as fractions of the floor",
        "engine.bench.gpu_mix",
        has_cpu_floors=False,
    ),
    Benchmark(
        "gpu-peers",
        ("G9",),
        "on a GPU: against transformers' generate and its continuous batching on the same weights",
        "engine.bench.gpu_peers",
        has_cpu_floors=False,
    ),
    Benchmark(
        "gpu-check",
        (),
        "on a GPU: runs one stage of `make gpu-check`, or `--first-contact`",
        "engine.bench.gpu_check",
        has_cpu_floors=False,
    ),
    Benchmark(
        "gpu-pair",
        (),
        "on a GPU: the pair over gRPC, 100 users and Poisson arrivals, latencies and the share that is served well",
        "engine.bench.gpu_pair",
        has_cpu_floors=False,
    ),
    Benchmark(
        "gpu-judge",
        (),
        "on a GPU: greedy answers of whole models in bf16, judged by transformers",
        "engine.bench.gpu_judge",
        has_cpu_floors=False,
    ),
    Benchmark(
        "gpu-invariance",
        (),
        "on a GPU: --batch-invariant gives the same bits in any batch, and its cost",
        "engine.bench.gpu_invariance",
        has_cpu_floors=False,
    ),
    Benchmark("adapters", (), "cost of LoRA adapters in a decode step", "engine.bench.adapters", has_cpu_floors=False),
    Benchmark(
        "experts",
        (),
        "decode steps of a mixture of experts on a CPU",
        "engine.bench.experts",
        has_cpu_floors=False,
    ),
    Benchmark("quality", (), "what int8 and int4 cost in quality on the demo model", "engine.bench.quality"),
    Benchmark("invariance-cost", (), "cost of --batch-invariant", "engine.bench.invariance_cost"),
    Benchmark("linear", (), "linear layers against every product of PyTorch", "engine.bench.linear_layers"),
    Benchmark("grouped-linear", (), "linear layers in K-quants and other integers", "engine.bench.grouped_layers"),
    Benchmark("masks", (), "cost of structured output per step", "engine.bench.masks", has_cpu_floors=False),
    Benchmark("solo", (), "one request alone: TPOT, and the share of a step outside the model", "engine.bench.solo"),
    Benchmark(
        "speculative",
        (),
        "drafts by prompt lookup: time per token with and without, where answers repeat themselves and where not",
        "engine.bench.speculative",
        has_cpu_floors=False,
    ),
    Benchmark(
        "step-profile",
        (),
        "profile of a step: time by kind of instruction and size of step",
        "engine.bench.step_profile",
    ),
    Benchmark(
        "weights-dtype",
        (),
        "decode steps by the dtype in which a CPU stores weights",
        "engine.bench.weights_dtype",
        has_cpu_floors=False,
    ),
)
