"""What a server looks at before it starts, and what ends it that is no fault of its engine."""

import os
import resource
import socket
import ssl
import subprocess
import sys
import time

import pytest

from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.server import http_server
from hex_llm.server.api_server import check_vertex_routes
from hex_llm.server.exchange import Exchange
from hex_llm.server.port_owner import port_owner
from hex_llm.server.start_checks import check_adapters, check_files, check_keys, check_open_files
from tests.server.serving import connect, head, read_answer, serving


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    paths = str(folder / "certificate.pem"), str(folder / "key.pem")
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*new, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


@pytest.mark.parametrize("path", ["predict", "predict/", "v1/ping?", "/ping?a=b", "/a b", "/a%20b", "http://a/b"])
@pytest.mark.parametrize("variable", ["AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE"])
def test_a_route_of_vertex_that_no_request_could_have_is_refused(variable, path):
    with pytest.raises(ConfigError, match=f"^{variable}="):
        check_vertex_routes({variable: path})


def test_routes_of_vertex_are_paths():
    check_vertex_routes({"AIP_HEALTH_ROUTE": "/v1/endpoints/12/deployedModels/34", "AIP_PREDICT_ROUTE": ""})


def test_a_certificate_and_its_key_are_taken(certificate):
    check_files(Config(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]))


def test_a_key_that_is_not_the_certificates_or_has_a_password_is_refused(certificate, tmp_path):
    locked = str(tmp_path / "locked.pem")
    lock = ["openssl", "pkey", "-in", certificate[1], "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    for key in (certificate[0], locked):
        with pytest.raises(ConfigError, match="are no certificate and its key"):
            check_files(Config(ssl_certfile=certificate[0], ssl_keyfile=key))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, ""),
        ({"enable_lora": True}, "--enable_lora: no request can name an adapter"),
        ({"enable_lora": True, "lora_allowed_prefixes": "owner/"}, ""),
        ({"enable_lora": True, "lora_modules": "a=owner/a", "max_lora_rank": 8}, ""),
        ({"max_lora_rank": 8}, "--max_lora_rank=8 changes nothing"),
        ({"max_num_mem_cached_lora": 2}, "--max_num_mem_cached_lora=2 changes nothing"),
        ({"enable_lora_cache": False}, "--no-enable_lora_cache changes nothing"),
    ],
)
def test_flags_of_adapters_that_nothing_comes_of_are_warned_of(flags, said, caplog):
    check_adapters(Config(**flags))
    assert [said in message for message in caplog.messages] == ([True] if said else [])


def test_a_cache_that_others_can_write_to_is_warned_of(tmp_path, caplog):
    tmp_path.chmod(0o755)
    check_files(Config(compilation_cache_dir=str(tmp_path)))
    assert not caplog.records
    tmp_path.chmod(0o777)
    check_files(Config(compilation_cache_dir=str(tmp_path)))
    assert "chmod 700" in caplog.text


@pytest.mark.parametrize(
    ("host", "environment", "warns"),
    [
        ("0.0.0.0", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"HEXLLM_API_KEYS": "sk-one"}, False),
        ("0.0.0.0", {"AIP_HTTP_PORT": "8080"}, False),
    ],
)
def test_a_server_that_anybody_can_use_is_warned_of(monkeypatch, caplog, host, environment, warns):
    for name in ("HEXLLM_API_KEYS", "AIP_HTTP_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with socket.create_server((host, 0)) as listener:
        check_keys(Config(), listener)
    assert ("no API keys" in caplog.text) == warns


def test_the_limit_on_open_files_is_raised_to_what_connections_need(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        check_open_files(Config(max_connections=1000))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
        assert not caplog.records
        if hard != resource.RLIM_INFINITY:
            check_open_files(Config(max_connections=hard))
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
            assert f"--max_connections={hard} needs" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_listens_on_a_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port_owner(port).startswith(f"Process {os.getpid()} (")
    assert port_owner(port) == "Another program"


def test_a_client_that_does_not_begin_with_tls_is_dropped(certificate, monkeypatch):
    monkeypatch.setattr(http_server, "HANDSHAKE_S", 0.3)

    async def answer(exchange: Exchange) -> None:
        await exchange.reply(200, b"{}")

    with serving(answer, ssl_certfile=certificate[0], ssl_keyfile=certificate[1]) as server:
        with connect(server) as silent:
            started = time.monotonic()
            assert silent.recv(1) == b""
            assert 0.2 < time.monotonic() - started < 5
        with ssl._create_unverified_context().wrap_socket(connect(server)) as client:
            client.sendall(head())
            assert read_answer(client)[0] == 200


def test_a_part_that_fails_ends_the_server_with_its_error():
    program = (
        "import socket, sys\n"
        "from hex_llm import log\n"
        "from hex_llm.config import Config\n"
        "from hex_llm.server.front import run_front\n"
        "log.configure()\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "config = Config(ssl_certfile='README.md', ssl_keyfile='README.md')\n"
        "door = socket.create_server(('127.0.0.1', 0))\n"
        "sys.exit(run_front(config, listener, door, b'', fleet=None))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "CRITICAL A part of the server failed" in done.stderr
    assert "SSLError" in done.stderr
