"""Benchmarks of the Triton kernels, each beside the ceilings of the same machine measured in the same run.

    python -m kernels.bench [--quick] [--device cuda|cpu] [--model llama-3.1-8b] [--only decode,linear] [--out FILE]

The frame is `device` (description of the device), `ceilings` (a copy and large matrix products), `timing` (CUDA graphs,
medians), `case` (check, then time), `journal` (results so far), `budget`, and `chairlift.bench.report`. Every other
module yields the cases of some kernels. A kernel whose result is wrong is not timed. On a CPU the kernels run under
Triton's interpreter, which tests the benchmarks and measures nothing.
"""
