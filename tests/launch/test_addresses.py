"""Which host this is, by flags, by environment, and by a metadata server."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.launch.addresses import Address, Place, find_place

GKE = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "tpu-0.svc,tpu-1.svc"}


def place(environment: Mapping[str, str] = {}, devices: Path = Path("/nowhere"), **flags) -> Place:
    return find_place(Config(num_hosts=flags.pop("num_hosts", 2), **flags), environment, devices=devices)


@contextmanager
def metadata_server(attributes: Mapping[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            prefix, _, name = self.path.rpartition("/")
            asked_right = prefix == "/computeMetadata/v1/instance/attributes"
            known = name in attributes and asked_right and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(attributes[name].encode() if known else b"")

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def tpu(tmp_path) -> Path:
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch()
    return tmp_path


def test_flags_say_it_whatever_the_environment_says():
    found = place(GKE, coordinator_address="10.0.0.2:7000", host_rank=0)
    assert found == Place(rank=0, num_hosts=2, coordinator=Address("10.0.0.2", 7000))


def test_an_address_of_ipv6_is_read_and_written_with_brackets():
    address = Address.parse("[fd00::2]:7000")
    assert (address, str(address)) == (Address("fd00::2", 7000), "[fd00::2]:7000")


@pytest.mark.parametrize("text", ["10.0.0.2", "10.0.0.2:", ":7000", "a:0", "a:70000", "fd00::2:7000", "http://a:1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match=r"--coordinator_address=.* is not HOST:PORT"):
        place(coordinator_address=text, host_rank=1)


def test_gke_says_it_by_environment():
    assert place(GKE) == Place(rank=1, num_hosts=2, coordinator=Address("tpu-0.svc", 7090))


def test_a_flag_takes_the_place_of_what_the_environment_says():
    assert place(GKE, host_rank=0).rank == 0
    assert place(GKE, coordinator_address="other:1").coordinator == Address("other", 1)


def test_slices_follow_each_other():
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "slice-0-host-0:8080",
    }
    found = place(GKE | slices, num_hosts=4)
    assert found == Place(rank=3, num_hosts=4, coordinator=Address("slice-0-host-0", 7090), num_slices=2)


def test_a_slice_without_its_number_is_refused():
    with pytest.raises(ConfigError, match="MEGASCALE_SLICE_ID below it, which is None"):
        place(GKE | {"MEGASCALE_NUM_SLICES": "2"}, num_hosts=4)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, r"give --coordinator_address=HOST:PORT.* and --host_rank, from 0 to 1\."),
        (GKE | {"TPU_WORKER_HOSTNAMES": "a,b,c"}, "--num_hosts=2, but TPU_WORKER_HOSTNAMES=a,b,c names 3 hosts"),
        (GKE | {"TPU_WORKER_ID": ""}, "TPU_WORKER_ID, which says which of them this is, is not set"),
        (GKE | {"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID, which says which of them this is, is 2"),
        (GKE | {"TPU_WORKER_ID": "one"}, "TPU_WORKER_ID=one is not a number"),
    ],
)
def test_what_is_missing_or_wrong_is_named(environment, message):
    with pytest.raises(ConfigError, match=message):
        place(environment)


def test_only_the_flag_that_is_missing_is_asked_for():
    with pytest.raises(ConfigError, match=r"which host this is: give --host_rank, from 0 to 1\."):
        place(coordinator_address="a:1")


@pytest.mark.parametrize("endpoints", ["10.0.0.2,10.0.0.3", "n0:8470:10.0.0.2,n1:8470:10.0.0.3"])
def test_a_tpu_vm_asks_its_metadata_server(tpu, endpoints):
    with metadata_server({"worker-network-endpoints": endpoints, "agent-worker-number": "1"}) as server:
        found = place({"GCE_METADATA_HOST": server, "http_proxy": "http://127.0.0.1:1"}, tpu)
    assert found == Place(rank=1, num_hosts=2, coordinator=Address("10.0.0.2", 7090))


def test_the_metadata_server_knows_of_slices(tpu):
    tpu_env = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2:8080'\n"
    attributes = {"worker-network-endpoints": "10.0.1.2", "agent-worker-number": "0", "tpu-env": tpu_env}
    with metadata_server(attributes) as server:
        found = place({"GCE_METADATA_HOST": server}, tpu)
    assert found == Place(rank=1, num_hosts=2, coordinator=Address("10.0.0.2", 7090), num_slices=2)


def test_without_a_tpu_nobody_is_asked(tmp_path):
    with (
        metadata_server({"worker-network-endpoints": "a,b", "agent-worker-number": "1"}) as server,
        pytest.raises(ConfigError, match="none of these is here"),
    ):
        place({"GCE_METADATA_HOST": server}, tmp_path)


def test_a_metadata_server_that_does_not_answer_is_named(tpu):
    with pytest.raises(ConfigError, match=r"does not answer at http://127\.0\.0\.1:9/.*--coordinator_address"):
        place({"GCE_METADATA_HOST": "127.0.0.1:9"}, tpu)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"host_rank": 0}, "--host_rank=0 is for --num_hosts above 1"),
        ({"coordinator_address": "a:1"}, "--coordinator_address=a:1 is for --num_hosts above 1"),
        ({"num_hosts": 2, "host_rank": 2}, "--host_rank=2 is not below --num_hosts=2"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        Config(**flags)
