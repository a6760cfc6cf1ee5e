"""Prompts are computed on one host and answered on another: equal answers, also where the other host is lost."""

import time

from tests.multihost.cluster import Hosts, hosts_serving
from tests.multihost.test_hosts import LONG, PROMPTS, RULES, alone, bodies, model
from tests.server.replicas import wait_for

__all__ = ["alone", "model"]  # fixtures

FLAGS = ("--disagg_topo=1,1", "--tensor_parallel_size=2", "--dtype=float32")
BLOCK_BYTES = 2 * 2 * 4 * 8 * 8 * 4  # layers, keys and values, heads, tokens, their width, float32


def wait_until_free(hosts: Hosts) -> None:
    time.sleep(1.2)  # after which engines have told all that there was
    for state in ("used", "held"):
        wait_for(lambda: hosts.metric(f'kv_blocks{{state="{state}"}}') == 0, 10, f"blocks are {state}")  # noqa: B023
    assert hosts.metric("invariant_violations_total") == 0


def test_blocks_go_from_host_to_host_and_a_host_that_is_lost_costs_no_answer(model, alone, tmp_path):
    with hosts_serving(2, model, tmp_path, *FLAGS) as hosts:
        (prefill,), (decode,) = hosts.tasks(0), hosts.tasks(1)
        assert (prefill["replica"], decode["replica"]) == (0, 1)
        assert all(task["pages"].startswith("tcp:") for task in (prefill, decode))
        assert hosts.ask(bodies(RULES)).texts() == alone["rules"]
        wait_until_free(hosts)
        assert hosts.metric("kv_transfers_total") == len(PROMPTS)
        assert hosts.metric("kv_transfer_bytes_total") == sum(-(-len(each) // 8) for each in PROMPTS) * BLOCK_BYTES
        assert hosts.metric("xla_compiles_after_ready_total") == 0
        asked = hosts.ask(bodies(LONG))
        asked.wait_until_under_way()
        hosts.processes[1].kill()
        assert asked.texts() == alone["long"]
        hosts.wait_for("Host 1 at", 5)
        hosts.processes[1] = hosts.start(1)
        hosts.wait_for("Engine built", 60, rank=1, count=2)
        wait_for(lambda: hosts.metric('replica_up{replica="1"}') == 1, 30, hosts.logs())
        before = hosts.metric("kv_transfers_total")
        assert hosts.ask(bodies(RULES)).texts() == alone["rules"]
        wait_until_free(hosts)
        assert hosts.metric("kv_transfers_total") == before + len(PROMPTS)
