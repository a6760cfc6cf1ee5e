"""The newcomer's path, timed: a fresh clone, the two commands of README.md, a first chat in a browser.

    scripts/newcomer [--cold] [--limit-s 300]

What is cloned is HEAD, from this checkout, into a temporary folder, which is removed again. Compiled steps of earlier
starts are never found. Packages come from uv's cache, or with --cold from where they are published. Exits with 1 where
the path cannot be walked to its end, or takes the limit or longer.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.server.browser import CHROMEDRIVER, CHROMIUM, ENTER, running_browser

ROOT = Path(__file__).parents[1]
PORT = 7080
URL = f"http://localhost:{PORT}"
QUESTION, ANSWER = "What is the capital of Italy?", "Rome"
# What a newcomer's shell does not have: environments, caches and settings of those who work on it.
OURS = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV")


def commands(readme: str) -> list[str]:
    """Those of the first block under "Start", a line each."""
    start = readme.partition("\n## Start\n")[2]
    return start.partition("\n```bash\n")[2].partition("\n```\n")[0].splitlines()


class Walk:
    """The steps so far, each with the seconds from the start to its end."""

    def __init__(self, limit_s: float):
        self.steps: list[tuple[str, float]] = []
        self._limit_s = limit_s
        self._started = time.monotonic()

    def arrive(self, step: str) -> None:
        seconds = time.monotonic() - self._started
        self.steps.append((step, seconds))
        if seconds >= self._limit_s:
            raise SystemExit(f"newcomer: {step}: after {seconds:.0f} s, and the limit is {self._limit_s:.0f} s.")

    def wait(self, condition: Callable[[], bool], step: str) -> None:
        while not condition() and time.monotonic() - self._started < self._limit_s:
            time.sleep(0.05)
        self.arrive(step)

    def table(self) -> str:
        starts = (0.0, *(end for _, end in self.steps[:-1]))
        rows = [f"| {step} | {end - start:.1f} |" for (step, end), start in zip(self.steps, starts, strict=True)]
        return "\n".join(["| step | seconds |", "|---|---|", *rows, f"| **total** | **{self.steps[-1][1]:.1f}** |"])


def walk(folder: Path, limit_s: float, cold: bool) -> Walk:
    path, clone, log = Walk(limit_s), folder / "hex-llm", folder / "log"
    subprocess.run(["git", "clone", "--quiet", ROOT.as_uri(), clone], check=True)
    path.arrive("the clone")
    first, second = commands((clone / "README.md").read_text())
    with running_shell(f"{first}\n{second}", clone, log, environment(folder, cold)) as shell:
        path.wait((clone / ".venv" / ".made-from").exists, "the first command: the environment")
        path.wait(is_ready, "the first command: the server is ready")
        path.wait(lambda: shell.poll() is not None, "the second command: an answer")
        if shell.returncode or "Paris" not in log.read_text() or not is_alive(shell.pid):
            raise SystemExit(f"newcomer: the commands ended with {shell.returncode}, and not with an answer.")
        with running_browser(folder / "browser-log") as browser:
            browser.open(URL)
            browser.wait(lambda: browser.text("#status") == "ready")
            path.arrive("a browser: the playground is open")
            browser.type("#input", QUESTION + ENTER)
            browser.wait(lambda: ANSWER in browser.text(".answer .text") and browser.is_shown("#send"))
            path.arrive("a browser: an answer")
    return path


def environment(folder: Path, cold: bool) -> dict[str, str]:
    """A shell's, in which nothing is cached but, unless it is to be cold, packages."""
    plain = {name: value for name, value in os.environ.items() if name not in OURS}
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    packages = folder / "packages" if cold else os.environ.get("UV_CACHE_DIR") or Path(user_cache) / "uv"
    return plain | {"XDG_CACHE_HOME": str(folder / "cache"), "UV_CACHE_DIR": str(packages)}


@contextlib.contextmanager
def running_shell(script: str, folder: Path, log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that is given a script; it and all that it started are ended after the body."""
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield shell
    except BaseException:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        for number, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
            if is_alive(shell.pid):
                os.killpg(shell.pid, number)
            deadline = time.monotonic() + seconds
            while is_alive(shell.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
        shell.wait()


def is_alive(group: int) -> bool:
    """Whether a process of the group runs; one that nobody has asked about its end yet does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/ping", timeout=5):
            return True
    except OSError:
        return False


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/newcomer", description="Walk the newcomer's path, and time it.")
    parser.add_argument("--cold", action="store_true", help="find no package in a cache")
    parser.add_argument("--limit-s", type=float, default=300, help="seconds that the path may take (default: 300)")
    arguments = parser.parse_args()
    if not (CHROMIUM and CHROMEDRIVER):
        raise SystemExit("newcomer: no chromium and chromedriver on the PATH; `scripts/setup browser` installs them.")
    if is_taken(PORT):
        raise SystemExit(f"newcomer: something listens on port {PORT}, which the README's commands want.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("newcomer: ended by SIGTERM."))
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        os.environ["TMPDIR"] = folder  # uv and Chromium leave things behind
        print(walk(Path(folder), arguments.limit_s, arguments.cold).table(), flush=True)


if __name__ == "__main__":
    main()
