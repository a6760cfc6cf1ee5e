"""What goes wrong on the way: what passes is waited for, what does not is told at once, and no file is ever half."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from hex_llm.download import patience, ranges, site
from hex_llm.download.fetch import fetch
from hex_llm.download.wanted import MODEL, TEXT
from hex_llm.errors import DownloadError, NoSpace
from hex_llm.progress import tell_nobody
from tests.download.test_fetch import INDEX, SMALL, WEIGHTS, names, same
from tests.faults.suite import record

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def counted() -> Iterator[Counter[str]]:
    """How often something went as it is to go, for the figures; from the hub and from Cloud Storage together."""
    counter: Counter[str] = Counter()
    yield counter
    record("F25", "; ".join(f"{what}: {times} times" for what, times in counter.items()))


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503, "times": 3},
        {"status": 500, "times": 2},
        {"status": 429, "times": 1, "headers": {"Retry-After": "0"}},
        {"reset": True, "cut": 0.5, "times": 3},
        {"reset": True, "cut": 0, "times": 2},
        {"cut": 0.3, "times": 2},
        {"length_off_by": 1000},
        {"length_off_by": -1000},
        {"flip": True},
        {"bytes_a_second": 30_000},
    ],
    ids=str,
)
def test_what_passes_is_got_over(fault, source, model, stand_in, counted):
    stand_in.set_faults({"match": SHARD} | fault)
    assert same(fetch(source, MODEL, timeout_s=5), model)
    counted["503, 429, resets, cuts, a wrong length or sum, 30 kB/s: all loads in the end"] += 1


def test_a_list_that_cannot_be_had_at_first_is_asked_for_again(source, model, stand_in):
    stand_in.set_faults({"match": r"/o\?prefix", "status": 503}, {"match": "/api/models", "status": 502})
    assert same(fetch(source, MODEL, timeout_s=5), model)


def test_as_long_is_waited_as_the_other_side_asks(source, stand_in):
    stand_in.set_faults({"match": SHARD, "status": 429, "headers": {"Retry-After": "2"}})
    started = time.monotonic()
    fetch(source, MODEL, timeout_s=5)
    assert 2 <= time.monotonic() - started < 4


def test_a_wait_beyond_all_patience_is_none(source, stand_in):
    stand_in.set_faults({"match": SHARD, "status": 429, "headers": {"Retry-After": "3600"}})
    started = time.monotonic()
    with pytest.raises(DownloadError, match=rf"{SHARD}: .* answers 429 .*given up after 5 s without a byte"):
        fetch(source, MODEL, timeout_s=5)
    assert time.monotonic() - started < 2


def test_one_that_says_to_come_back_at_once_and_always_does_is_not_asked_all_the_time(source, stand_in, monkeypatch):
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(ranges, "_CONNECTIONS", 1)
    stand_in.set_faults({"match": SHARD, "status": 429, "headers": {"Retry-After": "0"}, "times": 10_000})
    before = len(stand_in.asked_for(SHARD))
    with pytest.raises(DownloadError, match="answers 429"):
        fetch(source, MODEL, timeout_s=2)
    assert len(stand_in.asked_for(SHARD)) - before < 10


def test_bytes_that_are_there_already_are_none_that_have_come(source, stand_in, monkeypatch):
    """A server that knows no ranges sends the beginning each time, and never gets further."""
    monkeypatch.setattr(ranges, "_CONNECTIONS", 1)
    monkeypatch.setattr(patience, "_LONGEST_PAUSE_S", 0.1)
    stand_in.set_faults({"match": SHARD, "no_ranges": True, "reset": True, "cut": 0.3, "times": 100})
    with pytest.raises(DownloadError, match="given up after 1 s without a byte"):
        fetch(source, MODEL, timeout_s=1)


def test_once_one_is_refused_the_others_are_not_asked_for(source, stand_in, monkeypatch):
    monkeypatch.setattr(ranges, "RANGE", 1024)
    stand_in.set_faults({"match": SHARD, "status": 404})
    with pytest.raises(DownloadError, match="answers 404"):
        fetch(source, MODEL, timeout_s=5)
    before = len(stand_in.log())
    time.sleep(1)
    assert len(stand_in.log()) - before <= 16  # those that were under way, and where they lead


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"status": 302, "headers": {"Location": "ftp://127.0.0.1/x"}}, "does not lead to it .UnsupportedProtocol"),
        ({"body": "no gzip", "headers": {"Content-Encoding": "gzip"}}, "does not lead to it .DecodingError"),
        ({"body": "no JSON"}, "answers with something that is no JSON object"),
    ],
)
def test_what_will_never_be_an_answer_is_not_asked_for_again(fault, words, source, stand_in):
    stand_in.set_faults({"match": r"/o\?prefix|/api/models", "times": 1000} | fault)
    started = time.monotonic()
    with pytest.raises(DownloadError, match=words):
        fetch(source, MODEL, timeout_s=30)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("status", [403, 404])
def test_what_is_refused_is_told_at_once_by_name_though_others_hang(status, source, stand_in, counted):
    stand_in.set_faults(
        {"match": "model-00001", "stall": 30, "cut": 0.5, "times": 4}, {"match": SHARD, "status": status, "times": 100}
    )
    started = time.monotonic()
    with pytest.raises(DownloadError, match=f"{SHARD}: .* answers {status}") as caught:
        fetch(source, MODEL, timeout_s=60)
    assert caught.value.status == status
    assert time.monotonic() - started < 5
    counted["403, 404: told within 5 s"] += 1
    assert SHARD not in names(source.store.snapshot(source.list(patience.Patience(5)).version))


def test_damage_that_stays_is_told_and_leaves_no_file(source, stand_in, counted):
    stand_in.set_faults({"match": SHARD, "flip": True, "times": 1000})
    with pytest.raises(DownloadError, match=rf"{SHARD} came damaged twice: its (sha256|crc32c) is "):
        fetch(source, MODEL, timeout_s=5)
    version = source.list(patience.Patience(5)).version
    assert names(source.store.snapshot(version)) == SMALL | INDEX
    stand_in.set_faults()
    assert names(fetch(source, MODEL, timeout_s=5)) == SMALL | INDEX | WEIGHTS
    counted["a wrong sum again and again: told after the second download, no file"] += 1


def test_a_connection_that_falls_silent_is_given_up_for_another(source, stand_in, monkeypatch):
    monkeypatch.setattr(site, "_FIRST_READ_S", 0.3)
    stand_in.set_faults({"match": SHARD, "stall": 30, "cut": 0.1, "times": 1})
    started = time.monotonic()
    fetch(source, MODEL, timeout_s=5)  # another connection does
    assert time.monotonic() - started < 5


def test_a_server_that_stays_silent_is_given_up(source, stand_in, monkeypatch, counted):
    monkeypatch.setattr(site, "_FIRST_READ_S", 0.2)
    stand_in.set_faults({"match": SHARD, "stall": 10, "cut": 0, "times": 1000})
    started = time.monotonic()
    with pytest.raises(DownloadError, match=rf"{SHARD}: the connection to .* failed .*given up after 2 s"):
        fetch(source, MODEL, timeout_s=2)
    assert time.monotonic() - started < 6
    counted["silence: given up at its timeout"] += 1


def test_nobody_there_is_told(source, stand_in):
    stand_in.set_faults({"match": r"/o\?prefix|/api/models", "hang_up": True, "times": 1000})
    with pytest.raises(DownloadError, match=rf"the connection to {stand_in.url} failed .*given up after 1 s"):
        fetch(source, MODEL, timeout_s=1)


def test_a_link_that_has_expired_is_asked_for_again(source, model, stand_in, monkeypatch):
    monkeypatch.setattr(ranges, "_CONNECTIONS", 1)
    stand_in.set_faults({"match": f"/cdn/{source}/{SHARD} bytes=65536", "status": 403})
    assert same(fetch(source, MODEL, timeout_s=5), model)


def test_a_disk_that_fills_up_on_the_way_is_told_and_leaves_no_file(source, stand_in, monkeypatch, counted):
    real = os.pwrite

    def pwrite(file, data, at):
        if at > 65536:
            raise OSError(28, "No space left on device")
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(NoSpace, match=r"safetensors needs .* more in .*, which has .* left\."):
        fetch(source, MODEL, timeout_s=5)
    monkeypatch.undo()
    version = source.list(patience.Patience(5)).version
    assert names(source.store.snapshot(version)) == SMALL | INDEX
    counted["a disk that fills up: told, no file"] += 1


FETCH = """
import logging, sys
from pathlib import Path
from hex_llm.download import patience, ranges
from hex_llm.download.fetch import fetch, open_source
from hex_llm.download.reference import parse_reference
from hex_llm.download.wanted import MODEL
ranges.RANGE, patience._FIRST_PAUSE_S = 65536, 0.01
print(fetch(open_source(parse_reference(sys.argv[1]), Path(sys.argv[2])), MODEL, timeout_s=30))
"""


def fetching(source, stand_in, cache) -> subprocess.Popen:
    """Another process that does the same."""
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, str(source), str(cache)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | stand_in.environment,
    )


def ranges_of(stand_in, source, name):
    own = str(source).split("/")[-1]
    asked = [each for each in stand_in.asked_for(name) if own in each["path"]]
    return [each["range"] for each in asked if "/resolve/" not in each["path"]]


def test_who_comes_after_one_that_was_killed_has_only_the_rest_to_do(source, model, stand_in, tmp_path):
    size = (model / SHARD).stat().st_size
    last = f"bytes={size // 65536 * 65536}-{size - 1}"
    stand_in.set_faults({"match": rf"(cdn|/o)/.*{SHARD}.* {last}", "stall": 60, "cut": 0.5})
    process = fetching(source, stand_in, tmp_path / "cache")
    blobs, deadline = source.store.folder / "blobs", time.monotonic() + 30
    while [ticks.read_bytes() for ticks in blobs.glob("*.part.65536")] != [b"\1" * (size // 65536) + b"\0"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = len(ranges_of(stand_in, source, SHARD))
    assert same(fetch(source, MODEL, timeout_s=5), model)
    assert ranges_of(stand_in, source, SHARD)[before:] == [last]


def test_names_are_given_by_one_at_a_time(source, model, stand_in):
    """Who replaces a link would take it away, for a moment, from another who has just made it."""
    folder = fetch(source, TEXT, timeout_s=5)
    (folder / "config.json").unlink()
    with source.store.lock(tell_nobody):
        thread = threading.Thread(target=fetch, args=(source, TEXT), kwargs={"timeout_s": 5}, daemon=True)
        thread.start()
        time.sleep(1)
        assert not (folder / "config.json").exists()
    thread.join(10)
    assert same(folder, model)


def test_two_that_start_at_once_download_once(source, model, stand_in, tmp_path):
    stand_in.set_faults({"match": SHARD, "bytes_a_second": 30_000, "times": 1})
    both = [fetching(source, stand_in, tmp_path / "cache") for _ in range(2)]
    folders = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (folder,) = folders
    assert same(source.store.snapshot(folder.rsplit("/", 1)[1]), model)
    asked = ranges_of(stand_in, source, SHARD)
    assert len(asked) == len(set(asked))
