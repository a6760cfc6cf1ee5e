"""A worker whose times are easily added up, and settings of it."""

from hex_llm.bench.disagg.rates import Bounds, Link, Rates, Times
from hex_llm.bench.disagg.simulation import Setting

# A decode step is 10 ms and 1 ms a sequence, a prompt's 20 ms and 1 ms a token, 0.5 beside decodes; a token's pages
# are sent in 0.1 ms. Context costs nothing.
TIMES = Times(10e-3, 1e-3, 0.0, 20e-3, 1e-3, 0.0, 0.5e-3)
RATES = Rates(TIMES, Bounds(kv_tokens=100_000, max_decode_seqs=64, step_tokens=256, mixed_tokens=128), Link(1, 10_000))
CHUNKED, WHOLE, SPLIT = Setting(plain=1), Setting(plain=1, chunked=False), Setting(prefill=1, decode=1)
