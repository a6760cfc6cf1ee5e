import asyncio
import json
import select
import socket
import struct
import threading
import time

import pytest

from hex_llm.config import Config
from hex_llm.errors import EngineDead
from hex_llm.server.exchange import ClientGone, Exchange
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

LIMIT = 1_000_000
CHUNKED = "Transfer-Encoding: chunked"


async def by_path(exchange: Exchange) -> None:
    match exchange.path:
        case "/json":
            await exchange.reply(200, json.dumps(await exchange.json()).encode())
        case "/wait":
            await exchange.body()
            await asyncio.wait_for(exchange.gone.wait(), 20)
            raise ClientGone
        case "/wait-then-reply":
            await exchange.body()
            await asyncio.wait_for(exchange.gone.wait(), 20)
            await exchange.reply(200, b"to nobody")
        case "/ticks":
            await exchange.body()
            await exchange.begin_stream()
            while True:
                await exchange.send(b"data: tick\n\n")
                await asyncio.sleep(0.01)
        case "/flood":
            await exchange.body()
            await exchange.begin_stream()
            while True:
                await exchange.send(b"x" * 10_000)
                # As a stream waits for its next token: a connection that was reset takes everything at once, and nobody
                # would ever come to say so.
                await asyncio.sleep(0)
        case "/three":
            await exchange.begin_stream(headers=[("X-Accel-Buffering", "no")])
            for number in range(3):
                await exchange.send(b"data: %d\n\n" % number)
            await exchange.end_stream()
        case "/fail":
            asyncio.get_running_loop().call_later(0.05, exchange.fail, EngineDead("The engine has stopped."))
            try:
                with exchange.handled():
                    await asyncio.sleep(20)
            except asyncio.CancelledError as error:
                raise exchange.cause(error) from None
        case "/stop":
            await exchange.begin_stream()
            await exchange.send(b"data: 1\n\n")
        case "/none":
            await exchange.reply(204, b"")
        case "/ignore":
            await exchange.reply(200, b"ignored")
        case _:
            await exchange.reply(200, await exchange.body())


@pytest.fixture(scope="module")
def server():
    with serving(by_path, max_body_bytes=LIMIT) as server:
        yield server


@pytest.fixture(scope="module")
def hasty():
    with serving(by_path, body_timeout_s=0.5, write_timeout_s=0.8) as server:
        yield server


@pytest.fixture(autouse=True)
def no_task_is_left(server, hasty):
    yield
    for each in (server, hasty):
        wait_until(lambda each=each: not each.server.server_state.connections)
        wait_until(lambda each=each: each.num_tasks() <= 2)  # uvicorn's own, and the one that counts
        each.outcomes.clear()


def post_to(path: str, body: bytes = b"{}", *headers: str) -> bytes:
    return head("POST", path, f"Content-Length: {len(body)}", *headers) + body


def chunks(path: str, *parts: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return head("POST", path, CHUNKED) + framed + b"0\r\n\r\n"


# Bodies


def test_a_body_of_the_largest_size_is_taken(server):
    status, _, body = ask(server, post(b"x" * LIMIT))
    assert (status, body) == (200, b"x" * LIMIT)


def test_a_body_in_chunks_is_put_together(server):
    assert ask(server, chunks("/", b"ab", b"c" * 200_000, b"d"))[2] == b"ab" + b"c" * 200_000 + b"d"


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(server):
    with connect(server) as client:
        client.sendall(head("POST", "/", f"Content-Length: {LIMIT + 1}"))
        status, headers, body = read_answer(client)
        assert status == 413
        assert headers["connection"] == "close"
        assert error_of(body)["code"] == "content_too_large"
        assert str(LIMIT) in error_of(body)["message"]


def test_a_body_that_grows_too_large_is_refused(server):
    status, headers, body = ask(server, chunks("/", *[b"x" * 10_000] * 101))
    assert (status, headers["connection"]) == (413, "close")
    assert error_of(body)["code"] == "content_too_large"


def test_a_client_that_sends_all_of_a_large_body_before_it_reads_gets_the_refusal(server):
    with connect(server) as client:
        client.sendall(post(b"x" * (20 * LIMIT)))
        assert read_answer(client)[0] == 413
        assert read_all(client) == b""


def test_a_client_that_asks_first_does_not_send_a_body_that_is_too_large(server):
    with connect(server) as client:
        client.sendall(head("POST", "/", f"Content-Length: {LIMIT + 1}", "Expect: 100-continue"))
        assert read_answer(client)[0] == 413
    with connect(server) as client:
        client.sendall(head("POST", "/", "Content-Length: 2", "Expect: 100-continue"))
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(b"{}")
        assert read_answer(client)[2] == b"{}"


@pytest.mark.parametrize("drip", [b"", b"x"])
def test_a_slow_body_is_refused_after_the_time_it_has(hasty, drip):
    started = time.monotonic()
    with connect(hasty) as client:
        client.sendall(head("POST", "/", "Content-Length: 10000") + b"x")
        client.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() - started < 10:
            client.sendall(drip)
            try:
                answer = client.recv(65536)
            except TimeoutError:
                continue
    assert 0.45 <= time.monotonic() - started < 5
    assert parse_head(answer)[0] == 408
    assert error_of(answer.split(b"\r\n\r\n", 1)[1])["code"] == "request_timeout"


def test_a_large_body_has_more_time(hasty):
    """200 kB are worth two seconds more."""
    with connect(hasty) as client:
        client.sendall(head("POST", "/", "Content-Length: 200001") + b"x" * 200_000)
        time.sleep(0.9)
        client.sendall(b"y")
        assert read_answer(client)[0] == 200


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"', None]
)
def test_json_is_read(server, kind):
    headers = [f"Content-Type: {kind}"] if kind else []
    assert ask(server, post_to("/json", b'{"a": [1]}', *headers))[2] == b'{"a": [1]}'


@pytest.mark.parametrize(
    "kind",
    ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "application/jsonp", "json",
     "application/json; charset=latin-1", "\xe9" * 300],
)  # fmt: skip
def test_other_types_than_json_are_refused(server, kind):
    status, _, body = ask(server, post_to("/json", b'{"a": 1}', f"Content-Type: {kind}"))
    assert status == 415
    assert "Content-Type: application/json" in error_of(body)["message"]
    assert len(error_of(body)["message"]) < 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x"])
def test_an_encoded_body_is_refused(server, encoding):
    status, _, body = ask(server, post_to("/json", b"{}", f"Content-Encoding: {encoding}"))
    assert (status, error_of(body)["code"]) == (415, "unsupported_media_type")


def test_a_body_that_says_it_is_not_encoded_is_taken(server):
    assert ask(server, post_to("/json", b"{}", "Content-Encoding: identity"))[0] == 200


def test_bad_json_is_refused(server):
    status, _, body = ask(server, post_to("/json", b'{"a": NaN}'))
    assert (status, error_of(body)["type"]) == (400, "invalid_request_error")


def test_a_body_that_nobody_reads_is_let_in_and_the_connection_closed(server):
    with connect(server) as client:
        client.sendall(head("POST", "/ignore", f"Content-Length: {3 * LIMIT}") + b"x" * 3 * LIMIT)
        _, headers, body = read_answer(client)
        assert (headers["connection"], body) == ("close", b"ignored")
        assert read_all(client) == b""


# Answers


def test_a_connection_is_used_again(server):
    with connect(server) as client:
        for number in range(5):
            client.sendall(post(b"%d" % number))
            assert read_answer(client)[2] == b"%d" % number


def test_a_stream_comes_part_by_part_and_ends(server):
    with connect(server) as client:
        client.sendall(head("GET", "/three", "Connection: close"))
        answer = read_all(client)
    status, headers = parse_head(answer)
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert headers["x-accel-buffering"] == "no"
    assert headers["cache-control"] == "no-store"
    assert answer.split(b"\r\n\r\n", 1)[1] == b"".join(b"9\r\ndata: %d\n\n\r\n" % n for n in range(3)) + b"0\r\n\r\n"


def test_a_request_can_be_broken_off_in_whatever_it_waits_for(server):
    with connect(server) as client:
        client.sendall(head("GET", "/fail", "Connection: close"))
        answer = read_all(client)
    assert parse_head(answer)[0] == 503
    assert b'{"error":{"message":"The engine has stopped."' in answer


def test_a_stream_that_its_handler_leaves_is_cut_off(server):
    with connect(server) as client:
        client.sendall(head("GET", "/stop"))
        try:
            answer = read_all(client)
        except ConnectionResetError:
            answer = b""
    assert not answer.endswith(b"0\r\n\r\n")


def test_head_has_the_headers_of_get_and_no_body(server):
    with connect(server) as client:
        client.sendall(head("HEAD", "/ignore", "Connection: close"))
        answer = read_all(client)
    assert parse_head(answer)[1]["content-length"] == "7"
    assert answer.endswith(b"\r\n\r\n")


def test_other_methods_reach_the_handler(server):
    assert ask(server, head("OPTIONS", "/ignore"))[0] == 200
    assert ask(server, head("BREW", "/ignore"))[0] == 200


def test_an_answer_without_content_has_no_length(server):
    with connect(server) as client:
        client.sendall(head("GET", "/none", "Connection: close"))
        answer = read_all(client)
    assert parse_head(answer)[0] == 204
    assert "content-length" not in parse_head(answer)[1]


@pytest.mark.parametrize("label", ["a", "My.id_1-2", "x" * 128])
def test_a_good_request_id_comes_back(server, label):
    assert ask(server, head("GET", "/ignore", f"X-Request-Id: {label}"))[1]["x-request-id"] == label


@pytest.mark.parametrize("label", ["", "a b", "x" * 129, "\xe9", "a,b", "a\x01"])
def test_a_bad_request_id_is_replaced(server, label):
    assert ask(server, head("GET", "/ignore", f"X-Request-Id: {label}"))[1]["x-request-id"].startswith("req-")


def test_request_ids_are_the_servers_own():
    scope = {"method": "GET", "path": "/", "headers": [(b"x-request-id", b"mine"), (b"A", b"1"), (b"a", b"\xff")]}

    async def make() -> list[Exchange]:
        return [Exchange(scope, None, None, Config(), "key") for _ in range(2)]

    first, second = asyncio.run(make())
    assert first.request_id.startswith("req-")
    assert first.request_id != second.request_id
    assert first.headers["a"] == "1, \xff"
    assert (first.key_id, first.begun, first.status) == ("key", False, None)


# Clients that leave


SOON_S = 5  # a moment, on a machine that has much else to do; handlers would wait for 20 s


def leave(client: socket.socket, how: str) -> None:
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("path", ["/wait", "/wait-then-reply", "/ticks", "/flood"])
def test_a_client_that_leaves_is_noticed_soon(server, path, how):
    client = connect(server)
    client.sendall(post_to(path))
    time.sleep(0.1)
    leave(client, how)
    assert wait_until(lambda: server.outcomes) < SOON_S
    assert server.outcomes == ["gone"]


@pytest.mark.parametrize("wait", [0, 0.1])
@pytest.mark.parametrize("extra", [b"\r\n", head("GET", "/2"), post(b"x" * 100_000)], ids=["blank", "request", "large"])
def test_a_client_that_has_sent_more_and_leaves_is_noticed(server, wait, extra):
    client = connect(server)
    client.sendall(post_to("/wait"))
    time.sleep(wait)
    client.sendall(extra)
    time.sleep(0.1)
    client.close()
    assert wait_until(lambda: server.outcomes) < SOON_S


def test_a_client_that_has_offered_an_upgrade_and_leaves_is_noticed(server):
    client = connect(server)
    client.sendall(post_to("/wait", b"{}", "Connection: Upgrade", "Upgrade: h2c"))
    time.sleep(0.1)
    client.close()
    assert wait_until(lambda: server.outcomes) < SOON_S


def test_a_client_that_leaves_within_its_body_is_noticed(server):
    client = connect(server)
    client.sendall(head("POST", "/", "Content-Length: 100") + b"x")
    time.sleep(0.1)
    client.close()
    assert wait_until(lambda: server.outcomes) < SOON_S
    assert server.outcomes == ["gone"]


def test_many_clients_leave_at_once(server):
    clients = [connect(server) for _ in range(100)]
    for number, client in enumerate(clients):
        client.sendall(post_to(("/wait", "/ticks")[number % 2]))
    time.sleep(0.3)
    for client in clients:
        leave(client, "reset")
    wait_until(lambda: len(server.outcomes) == 100, 5)
    assert set(server.outcomes) == {"gone"}


def test_a_client_that_stays_is_not_taken_for_gone():
    seen = []

    async def look(exchange: Exchange) -> None:
        await exchange.body()
        await asyncio.sleep(0.05)
        await exchange.reply(200, b"ok")
        await asyncio.sleep(0.05)
        seen.append(exchange.gone.is_set())

    with serving(look) as server, connect(server) as client:
        for _ in range(3):
            client.sendall(post(b"x"))
            assert read_answer(client)[2] == b"ok"
        wait_until(lambda: len(seen) == 3)
    assert not any(seen)


# Clients that do not read


def ticks_per_second(server, seconds: float) -> float:
    with connect(server) as client:
        client.sendall(post_to("/ticks"))
        until, count = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            count += client.recv(65536).count(b"tick")
    return count / seconds


def test_a_client_that_does_not_read_is_cut_off_and_costs_the_others_nothing(hasty):
    rates = [ticks_per_second(hasty, 0.5)]
    wait_until(lambda: hasty.outcomes == ["gone"])
    stalled = [connect(hasty) for _ in range(10)]
    started = time.monotonic()
    for client in stalled:
        client.sendall(post_to("/flood"))
    reader = threading.Thread(target=lambda: rates.append(ticks_per_second(hasty, 1.0)))
    reader.start()
    wait_until(lambda: hasty.outcomes.count("gone") >= 11)
    took = time.monotonic() - started
    reader.join()
    wait_until(lambda: not hasty.server.server_state.connections)
    assert 0.75 <= took < 6
    alone, among_stalled = rates
    assert among_stalled > 0.3 * alone
    for client in stalled:
        client.close()


def test_a_client_that_reads_slowly_is_served(hasty):
    """It takes something within each write timeout."""
    with connect(hasty) as client:
        client.sendall(post_to("/flood"))
        until, size = time.monotonic() + 2.0, 0
        while time.monotonic() < until:
            size += len(client.recv(1_000_000))
            time.sleep(0.02)
        assert size > 1_000_000
        assert not hasty.outcomes


def test_an_answer_that_nobody_reads_is_given_up_and_so_is_what_was_asked_behind_it():
    async def large(exchange: Exchange) -> None:
        await exchange.reply(200, b"x" * 20_000_000)

    with serving(large, write_timeout_s=0.5, keep_alive_timeout_s=10) as server, connect(server) as client:
        client.sendall(head() + head())
        wait_until(lambda: server.outcomes == ["gone"], 5)
        wait_until(lambda: not server.server.server_state.connections)
        # Not even the kernel keeps it: the client is told, though it has read nothing of what came before.
        poll = select.poll()
        poll.register(client, 0)
        assert poll.poll(2000)[0][1] & select.POLLERR
