"""How fast the Triton kernels are, beside what the same machine reached a moment before.

    python -m kernels.bench [--quick] [--device cuda|cpu] [--model llama-3.1-8b] [--only decode,linear] [--out FILE]

The frame is `device` (where, and what it is), `ceilings` (a copy and large matrix products), `timing` (CUDA graphs,
medians), `case` (check, then time), `figure` and `journal` (what came out), `budget`. Every other module has a function
that yields the cases of some kernels. A kernel whose result is wrong is not timed. On a CPU the kernels run under
Triton's interpreter: that shows that all of this works, and measures nothing.
"""
