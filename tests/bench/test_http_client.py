"""The HTTP client against bytes as servers send them, good and bad."""

import asyncio

import pytest

from hex_llm.bench.http_client import ChunkedBody, HttpClient, HttpError

CHUNKED = b"5\r\nhello\r\n1;name=value\r\n,\r\n6\r\n\r\nworl\r\n0\r\nTrailer: x\r\n\r\n"


@pytest.mark.parametrize("size", range(1, len(CHUNKED) + 1))
def test_chunks_are_put_together_however_they_are_cut(size):
    body = ChunkedBody()
    pieces = [body.feed(CHUNKED[start : start + size]) for start in range(0, len(CHUNKED), size)]
    assert b"".join(pieces) == b"hello,\r\nworl"
    assert body.done


def test_chunks_that_come_at_once_are_one_piece():
    assert ChunkedBody().feed(CHUNKED) == b"hello,\r\nworl"


@pytest.mark.parametrize("line", [b"xyz\r\n", b"-5\r\n", b"a" * 70_000])
def test_a_chunk_without_a_size_is_an_error(line):
    with pytest.raises(HttpError):
        ChunkedBody().feed(line)


def exchange(*answers: bytes, requests: int = 1, headers=None):
    """What a client gets from a server that sends these bytes: one item for each answer, on a connection until
    an empty one closes it. Returns statuses with bodies or errors, what the server read, and its connections."""
    left, heads, connections = list(answers), [], []

    async def serve(reader, writer):
        connections.append(None)
        try:
            while left:
                heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
                if not (answer := left.pop(0)):
                    break
                writer.write(answer)
                if b"lazy" not in answer and any(word in answer for word in (b"close", b"HTTP/1.0", b"short")):
                    break
        except (EOFError, OSError):
            pass
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient(f"http://127.0.0.1:{port}/base/", headers or {})
        results = []
        for _ in range(requests):
            try:
                async with asyncio.timeout(5), client.request("GET", "/path") as response:
                    results.append((response.status, await response.read_all()))
            except HttpError as error:
                results.append(str(error))
            await asyncio.sleep(0.02)  # for what the server does afterwards
        client.close()
        server.close()
        return results

    return asyncio.run(run()), heads, len(connections)


SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_a_request_has_the_path_the_host_and_the_headers():
    results, heads, _ = exchange(SIZED, headers={"X-Team": "red"})
    assert results == [(200, b"ok")]
    first, host, *rest = heads[0].split("\r\n")
    assert first == "GET /base/path HTTP/1.1"
    assert host.startswith("Host: 127.0.0.1:")
    assert "X-Team: red" in rest


def test_a_connection_is_used_again():
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED
    results, _, connections = exchange(SIZED, chunked, b"HTTP/1.1 204 No\r\n\r\n", SIZED, requests=4)
    assert results == [(200, b"ok"), (200, b"hello,\r\nworl"), (204, b""), (200, b"ok")]
    assert connections == 1


@pytest.mark.parametrize(
    "closing",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\n\r\nok",
        b"HTTP/1.1 200 lazy\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.0 200 lazy\r\nContent-Length: 2\r\n\r\nok",
    ],
)
def test_a_connection_that_the_server_closes_is_not_used_again(closing):
    results, _, connections = exchange(closing, SIZED, requests=2)
    assert results == [(200, b"ok"), (200, b"ok")]
    assert connections == 2


def test_a_connection_that_was_closed_while_idle_costs_no_request():
    without_a_word = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nclose"
    results, _, connections = exchange(without_a_word, SIZED, requests=2)
    assert results == [(200, b"close"), (200, b"ok")]
    assert connections == 2


def test_a_connection_that_was_idle_for_long_is_not_trusted(monkeypatch):
    monkeypatch.setattr("hex_llm.bench.http_client.MAX_IDLE_S", 0.0)
    results, _, connections = exchange(SIZED, SIZED, requests=2)
    assert results == [(200, b"ok"), (200, b"ok")]
    assert connections == 2


def test_a_request_is_never_sent_twice():
    results, heads, _ = exchange(SIZED, b"", SIZED, requests=2)
    assert results == [(200, b"ok"), "The server closed the connection without an answer."]
    assert len(heads) == 2


def test_an_interim_answer_is_passed_over():
    assert exchange(b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED)[0] == [(200, b"ok")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "The server closed the connection without an answer."),
        (b"HTTP/1.1 200 short", "The server closed the connection in the middle of its answer."),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nshort", "The server closed the connection 15 bytes before"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort",
            "The server closed the connection in the middle of its answer.",
        ),
        (b"SSH-2.0 short\r\n\r\n", "The server does not speak HTTP/1.1: its answer starts with 'SSH-2.0 short'."),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n", "The server sent 'two' as the Content-Length."),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, "The head of the server's answer is longer than 65536 bytes."),
    ],
)
def test_a_bad_answer_is_an_error_that_says_how(answer, message):
    ((result,), _, _) = exchange(answer)
    assert result.startswith(message)


def test_a_server_that_is_not_there_cannot_be_reached():
    async def run():
        async with HttpClient("http://127.0.0.1:9", {}).request("GET", "/"):
            pass

    with pytest.raises(HttpError, match=r"^127\.0\.0\.1:9 cannot be reached"):
        asyncio.run(run())
