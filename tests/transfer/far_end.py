"""A program for the tests: an engine's end of a Porter in a process of its own. Settings come in as JSON.

It says where it listens, as a line; then it gives every request that it is asked for, or fetches those that it is told.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hex_llm.engine.handover import Came, Complete, Left, Lost, Taken, Wanted
from tests.transfer.parts import End, staging

ROOT = Path(__file__).parents[2]


class FarEnd:
    """The near end of the process."""

    def __init__(self, address: str, **settings: Any):
        """num_parts and part_blocks of every request; delay: seconds before each part is sent or taken; fetch: request
        ids, and source, the address to fetch them from; fields: of the staging; and what a Porter takes."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.far_end", json.dumps({"address": address} | settings)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.address = self.read()

    def read(self) -> Any:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "it has ended"
        return json.loads(line)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


def _say(word: Any) -> None:
    print(json.dumps(word), flush=True)


def _give(end: End, num_parts: int, part_blocks: int, delay: float) -> None:
    wanted: dict[str, int] = {}  # the next part of each request
    while True:
        while not (wanted and end.told.empty()):
            match end.told.get():
                case Wanted(request_id, first):
                    assert first % part_blocks == 0
                    wanted[request_id] = first // part_blocks
                case Taken(request_id):
                    _say(["taken", request_id])
                case Left(request_id):
                    wanted.pop(request_id, None)
                    _say(["left", request_id])
        for request_id, number in [*wanted.items()]:
            if number == num_parts:
                end.porter.finish(request_id, 7, num_parts * part_blocks)
                del wanted[request_id]
            elif end.porter.has_room(request_id):
                time.sleep(delay)
                end.send(request_id, number * part_blocks, part_blocks)
                wanted[request_id] = number + 1
        time.sleep(1e-3)


def _fetch(end: End, source: str, request_ids: list[str], delay: float) -> None:
    for request_id in request_ids:
        end.porter.fetch(request_id, source, 0)
    while True:
        match end.told.get():
            case Came(part):
                time.sleep(delay)
                end.take(part)
                _say(["came", part.request_id, part.first])
            case Complete(request_id):
                end.porter.acknowledge(request_id)
                _say(["complete", request_id])
            case Lost(request_id, reason):
                _say(["lost", request_id, reason])


def main(settings: str) -> None:
    given = json.loads(settings)
    address, fields = given.pop("address"), given.pop("fields", {})
    delay, source, request_ids = given.pop("delay", 0.0), given.pop("source", ""), given.pop("fetch", [])
    num_parts, part_blocks = given.pop("num_parts", 4), given.pop("part_blocks", 4)
    end = End(address, staging(**{name: tuple(value) for name, value in fields.items()}), **given)
    _say(end.address)
    if source:
        _fetch(end, source, request_ids, delay)
    else:
        _give(end, num_parts, part_blocks, delay)


if __name__ == "__main__":
    main(*sys.argv[1:])
