"""What the processes of a server have in common: how a child is started, and how it begins.

Signals to the whole group, such as a terminal's Ctrl-C, are for the process that the user has started. It tells the
others; they take no notice themselves.
"""

import ctypes
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

# Exit codes of a server that has lost its engine.
ENGINE_DIED, ENGINE_HUNG = 70, 71

# What the processes of one server prove with that they belong together; given to those that need it, by environment.
CLUSTER_KEY = "HEX_LLM_CLUSTER_KEY"

# What a child gets only if it is said so: a chat template has no business with any of it, an engine, which downloads
# the model, with all but the hub's.
HUB_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SECRETS = ("HEXLLM_API_KEYS", "HEXLLM_CLUSTER_KEY", CLUSTER_KEY, *HUB_SECRETS)
_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def hold_signals() -> set[int]:
    """Has signals wait, in this process and those it starts, until there is somebody to take them; returns which
    ones waited before.
    """
    return signal.pthread_sigmask(signal.SIG_BLOCK, (*_GROUP, signal.SIGUSR1, signal.SIGUSR2))


def release_signals() -> None:
    """Lets the signals come that were held."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_GROUP, signal.SIGUSR1, signal.SIGUSR2))


def start_child(
    module: str,
    arguments: Sequence[str],
    files: Sequence[int] = (),
    *,
    secrets: Collection[str] = (),
    stdout: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Runs a module in a process of its own that inherits the open files; its main function calls `begin_child`.

    The kernel ends it together with the thread that calls this.
    """
    kept = {name: value for name, value in os.environ.items() if name in secrets or name not in SECRETS}
    held = hold_signals()
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            env=kept | dict(environment or {}) | {"HEX_LLM_PARENT": str(os.getpid())},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def machine() -> str:
    """Names what process numbers belong to: this machine since its start, and the part of it that a container sees."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return platform.node()


def begin_child() -> None:
    """The first thing a child does: it dies with its parent, however that goes, and leaves signals to it.

    Those that the child takes are still held; `release_signals` lets them come.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get("HEX_LLM_PARENT", str(os.getppid())) != str(os.getppid()):
        os._exit(1)  # it went before the kernel was asked
    for number in _GROUP:
        signal.signal(number, signal.SIG_IGN)
