"""One host of a world of two: `world_host.py COORDINATOR RANK NUMBER CACHE` prints the least number, and waits."""

import sys
import time

import jax

from hex_llm.parallel.hosts import join_hosts, least_of_hosts

if __name__ == "__main__":
    coordinator, rank, number, cache = sys.argv[1:]
    jax.config.update("jax_compilation_cache_dir", cache)
    join_hosts(coordinator, num_hosts=2, rank=int(rank), timeout=60)
    print("least", least_of_hosts(int(number)), flush=True)
    time.sleep(60)
