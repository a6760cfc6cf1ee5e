import asyncio
import socket
import time

import pytest

from hex_llm.server.exchange import Exchange
from tests.server.serving import (
    ask,
    connect,
    error_of,
    head,
    parse_head,
    post,
    read_all,
    read_answer,
    serving,
    wait_until,
)

CHUNKED = "Transfer-Encoding: chunked"


async def echo(exchange: Exchange) -> None:
    await exchange.reply(200, await exchange.body() or exchange.path.encode(), content_type="text/plain")


@pytest.fixture(scope="module")
def server():
    with serving(echo) as server:
        yield server


@pytest.fixture(scope="module")
def hasty():
    with serving(echo, head_timeout_s=0.5, keep_alive_timeout_s=0.4, max_connections=3) as server:
        yield server


def refused(server, request: bytes) -> tuple[int, dict]:
    """Status and error of a request, after which the server must end the connection."""
    with connect(server) as client:
        client.sendall(request)
        answer = read_all(client)
    status, headers = parse_head(answer)
    body = answer.split(b"\r\n\r\n", 1)[1]
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    assert headers["x-request-id"].startswith("req-")
    return status, error_of(body)


MALFORMED = {
    "garbage": b"\x00\x01\x02\x03\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no version": b"GET /\r\n\r\n",
    "blank line first": b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "lower-case http": b"GET / http/1.1\r\nHost: a\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": head("GET", "/", "Host: b"),
    "space before colon": head("GET", "/", "A : b"),
    "NUL in header": head("GET", "/", "A: b\0c"),
    "header without colon": head("GET", "/", "nothing"),
    "non-ASCII target": b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    "negative length": head("POST", "/", "Content-Length: -1"),
    "length in words": head("POST", "/", "Content-Length: ten"),
    "length of 30 digits": head("POST", "/", "Content-Length: " + 30 * "9"),
    "two lengths": head("POST", "/", "Content-Length: 1", "Content-Length: 2") + b"xx",
    "length list": head("POST", "/", "Content-Length: 1, 2") + b"xx",
    "gzip transfer": head("POST", "/", "Transfer-Encoding: gzip"),
    "gzip and chunked transfer": head("POST", "/", "Transfer-Encoding: gzip, chunked"),
    "two transfers": head("POST", "/", CHUNKED, CHUNKED),
    "bad chunk size": head("POST", "/", CHUNKED) + b"zz\r\nabc\r\n",
    "huge chunk size": head("POST", "/", CHUNKED) + b"f" * 30 + b"\r\n",
    "negative chunk size": head("POST", "/", CHUNKED) + b"-1\r\n",
    "chunk without end": head("POST", "/", CHUNKED) + b"1\r\nabc\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_http_is_refused_with_an_error_object(server, name):
    status, error = refused(server, MALFORMED[name])
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", None)
    assert "HTTP/1.1" in error["message"]


def test_the_handler_of_a_body_that_turns_out_malformed_is_told_at_once():
    with serving(echo) as server, connect(server) as client:
        client.sendall(MALFORMED["bad chunk size"])
        assert read_answer(client)[0] == 400
        assert wait_until(lambda: server.outcomes) < 1
        assert server.outcomes == ["gone"]


@pytest.mark.parametrize("version", ["9.9", "2.0", "0.9", "1.2"])
def test_other_versions_of_http_are_refused(server, version):
    status, error = refused(server, f"GET / HTTP/{version}\r\nHost: a\r\n\r\n".encode())
    assert status == 400
    assert f"HTTP/{version}" in error["message"]


def test_length_and_transfer_encoding_together_are_refused(server):
    status, error = refused(server, head("POST", "/", "Content-Length: 3", CHUNKED) + b"3\r\nabc\r\n0\r\n\r\n")
    assert status == 400
    assert "both Content-Length and Transfer-Encoding" in error["message"]


def test_chunks_in_http_1_0_are_refused(server):
    status, _ = refused(server, b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert status == 400


@pytest.mark.parametrize("pieces", [1, 10])
def test_a_head_that_is_too_large_is_refused(server, pieces):
    request = head("GET", "/", "A: " + "x" * 300_000)
    step = len(request) // pieces
    with connect(server) as client:
        for at in range(0, len(request), step):
            client.sendall(request[at : at + step])
        status, _, body = read_answer(client)
    assert status == 431
    assert error_of(body)["code"] == "headers_too_large"
    assert "65536 bytes" in error_of(body)["message"]


def test_a_head_that_never_ends_is_refused(server):
    status, _ = refused(server, b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000)
    assert status == 431


def test_a_long_target_is_refused(server):
    assert refused(server, head("GET", "/" + "x" * 70_000))[0] == 431
    assert ask(server, head("GET", "/" + "x" * 30_000))[0] == 200


@pytest.mark.parametrize("count", [257, 5000, 60_000])
def test_too_many_headers_are_refused(server, count):
    status, error = refused(server, head("GET", "/", *["A:"] * (count - 1)))
    assert (status, error["code"]) == (431, "headers_too_large")


def test_as_many_headers_as_allowed_are_taken(server):
    assert ask(server, head("GET", "/", *["A: b"] * 255))[0] == 200


def test_too_many_chunks_are_refused(server):
    status, error = refused(server, head("POST", "/", CHUNKED) + b"1\r\nx\r\n" * 70_000)
    assert (status, error["code"]) == (413, "content_too_large")
    assert "65536 chunks" in error["message"]


def test_many_chunks_are_taken_in_each_request(server):
    with connect(server) as client:
        for _ in range(2):
            client.sendall(head("POST", "/", CHUNKED) + b"2\r\nxy\r\n" * 40_000 + b"0\r\n\r\n")
            status, _, body = read_answer(client)
            assert (status, body) == (200, b"xy" * 40_000)


def test_a_slow_head_is_refused_after_the_time_it_has_however_it_drips(hasty):
    started = time.monotonic()
    with connect(hasty) as client:
        client.setblocking(False)
        answer = b""
        for byte in head("GET", "/", "A: " + "x" * 500):
            try:
                client.send(bytes([byte]))
                answer += client.recv(65536)
            except BlockingIOError:
                pass
            if answer:
                break
            time.sleep(0.02)
    assert 0.45 <= time.monotonic() - started < 5
    assert parse_head(answer)[0] == 408
    assert error_of(answer.split(b"\r\n\r\n", 1)[1])["code"] == "request_timeout"


def test_a_slow_head_is_refused_on_a_connection_that_was_used_before(hasty):
    with connect(hasty) as client:
        client.sendall(head())
        assert read_answer(client)[0] == 200
        client.sendall(b"GET / HT")
        assert read_answer(client)[0] == 408
        assert read_all(client) == b""


def test_a_slow_head_behind_a_pipelined_request_is_refused(hasty):
    with connect(hasty) as client:
        client.sendall(head() + b"GET / HT")
        assert read_answer(client)[0] == 200
        assert read_answer(client)[0] == 408


def test_a_connection_without_a_request_is_closed_silently(hasty):
    with connect(hasty) as client:
        started = time.monotonic()
        assert read_all(client) == b""
        assert 0.45 <= time.monotonic() - started < 5


def test_an_idle_connection_is_closed_silently(hasty):
    with connect(hasty) as client:
        client.sendall(head())
        assert read_answer(client)[0] == 200
        started = time.monotonic()
        assert read_all(client) == b""
        assert 0.35 <= time.monotonic() - started < 5


def test_a_request_under_way_is_not_timed_as_a_head():
    async def slow(exchange: Exchange) -> None:
        await exchange.body()
        await asyncio.sleep(1.0)
        await exchange.reply(200, b"done")

    with serving(slow, head_timeout_s=0.3, keep_alive_timeout_s=0.3, body_timeout_s=0.3) as server:
        assert ask(server, post(b"x"))[2] == b"done"


def test_connections_beyond_the_limit_are_refused_at_once_and_the_others_live(hasty):
    with connect(hasty) as first, connect(hasty) as second, connect(hasty) as third:
        for client in (first, second, third):
            client.sendall(head())
            assert read_answer(client)[0] == 200
        with connect(hasty) as fourth:
            status, headers, body = read_answer(fourth)
            assert (status, headers["retry-after"]) == (503, "1")
            assert "3 connections" in error_of(body)["message"]
        third.sendall(head())
        assert read_answer(third)[0] == 200
    wait_until(lambda: not hasty.server.server_state.connections)
    assert ask(hasty, head())[0] == 200


def test_pipelined_requests_are_answered_in_order(server):
    with connect(server) as client:
        client.sendall(head("GET", "/1") + post(b"two") + head("GET", "/3") + post(b"four"))
        assert [read_answer(client)[2] for _ in range(4)] == [b"/1", b"two", b"/3", b"four"]


def test_a_malformed_request_behind_a_good_one_is_answered_after_it(server):
    with connect(server) as client:
        client.sendall(head("GET", "/1") + b"bad\r\n\r\n")
        assert read_answer(client)[2] == b"/1"
        assert read_answer(client)[0] == 400
        assert read_all(client) == b""


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_offer_to_upgrade_is_ignored(server, protocol):
    with connect(server) as client:
        request = head("GET", "/1", "Connection: Upgrade", f"Upgrade: {protocol}", "Sec-WebSocket-Version: 13")
        client.sendall(request)
        status, _, body = read_answer(client)
        assert (status, body) == (200, b"/1")
        client.sendall(head("GET", "/2"))
        assert read_answer(client)[2] == b"/2"


def test_http_1_0_is_answered_and_closed(server):
    with connect(server) as client:
        client.sendall(b"GET /1 HTTP/1.0\r\n\r\n")
        answer = read_all(client)
    assert parse_head(answer)[0] == 200
    assert answer.endswith(b"\r\n\r\n/1")


def test_what_follows_the_last_request_of_a_connection_does_not_spoil_it():
    async def slow(exchange: Exchange) -> None:
        body = await exchange.body()
        await asyncio.sleep(0.5)
        await exchange.reply(200, body)

    with serving(slow) as server, connect(server) as client:
        client.sendall(post(b"one", "Connection: close") + b"\r\n")
        time.sleep(0.1)
        client.sendall(b"\r\n")
        answer = read_all(client)
    assert parse_head(answer)[0] == 200
    assert answer.endswith(b"one")


def test_an_answer_carries_no_name_of_the_server_and_is_not_kept(server):
    _, headers, _ = ask(server, head())
    assert "server" not in headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_answers_are_sent_without_delay(server):
    with connect(server) as client:
        client.sendall(head())
        read_answer(client)
        (protocol,) = server.server.server_state.connections
        connection = protocol.transport.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_that_does_not_read_a_whole_answer_is_dropped(monkeypatch):
    # All at once, as an application may that does not wait for the client.
    monkeypatch.setattr("hex_llm.server.exchange._PIECE_BYTES", 10**9)

    async def large(exchange: Exchange) -> None:
        await exchange.reply(200, b"x" * 30_000_000)

    with serving(large, write_timeout_s=0.5, keep_alive_timeout_s=0.2) as server, connect(server) as client:
        client.sendall(head())
        wait_until(lambda: server.outcomes)
        assert server.server.server_state.connections
        assert wait_until(lambda: not server.server.server_state.connections) < 5


def test_an_answer_that_comes_before_the_body_is_read_and_no_more_is_taken():
    """Even from an application that does not say so itself."""

    async def early(exchange: Exchange) -> None:
        exchange._body_expected = False
        await exchange.reply(200, b"early")

    with serving(early) as server, connect(server) as client:
        client.sendall(head("POST", "/", "Content-Length: 1000000") + b"x")
        assert read_answer(client)[2] == b"early"
        started = time.monotonic()
        assert read_all(client) == b""
        assert time.monotonic() - started < 8
