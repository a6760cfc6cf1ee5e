"""What share of a chip's published rates our server reaches. Every number is of one H200 and written down here alone.

They come from steps, kernels and prompts that were timed by themselves, and for 70B, of which only servers were
measured, from times between tokens and to the first one; none from throughput, which estimates are compared with.
docs/performance.md has them all: "On an H200", "Weights in few bits", "What was found out there", and
`bench/disagg/presets.py` the points. Other chips are taken to reach the same shares, which nobody has measured.
"""

from hex_llm.planning.precision import Cache, Weights

# Of memory's bandwidth, reading weights in a decode step. bf16: 4.29 ms of a step of 64 of Llama-3.1-8B are not
# attention, 5.04 of 128. fp8: 2.81 ms of 64 (0.74) and 19.8 of a 70B's (0.93); int4: 2.61 ms (0.6) and 19.8 (0.65);
# w4a8: 2.37 ms of 64 (0.56) and 14.9 of a 70B's (0.73), of which it has what is between.
# int8 is put between the two: its product of gate and up takes 33.8 us of 64 tokens (0.72). w8a8 is taken for fp8, with
# which it shares a kernel; a 70B has steps as long in it.
WEIGHTS: dict[Weights, float] = {
    "bf16": 0.92, "fp8": 0.84, "w8a8": 0.84, "int8": 0.75, "int4": 0.63, "w4a8": 0.63, "mxfp4": 0.63
}  # fmt: skip
# Of memory's bandwidth, reading keys and values: 105.4 and 203.1 us a layer for 64 and 128 contexts of 1500 (bf16),
# 62.8 and 113.6 (fp8). int8 has kernels of its own that were not timed; it is taken for fp8.
CACHE: dict[Cache, float] = {"auto": 0.79, "fp8": 0.68, "int8": 0.68}
# Of the peak of products, in prompts: 1024 tokens of Llama-3.1-8B in 22.4 ms, 8192 in 213.6 (bf16); in int4 they are
# decoded and multiplied as bf16. In FP8, prompts of 1000 tokens of a 70B at 0.14 s each, in w8a8 at 0.15 s, and in w4a8
# at 0.16 s.
PROMPTS_BF16 = 0.68
PROMPTS: dict[Weights, float] = {"fp8": 0.49, "w8a8": 0.49, "w4a8": 0.43}  # of the peak in 8 bits
# How much of a decode step's multiplying is not hidden behind reading, in units of its time at the chip's peak: by
# what 128 sequences take longer than 64 (0.75 ms for 0.97 of Llama-3.1-8B).
EXPOSED = 0.77
# Seconds of a layer in which neither happens: norms, merging, the start of kernels.
LAYER = 6e-6
# Seconds from a chip to the next one, about; as in `bench/roofline`.
HOP = 1e-6
