"""What child processes have in common."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that started it is gone, however it went."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.environ.get("HEX_LLM_PARENT", str(os.getppid())) != str(os.getppid()):
        os._exit(1)  # it went before the kernel was asked


def child_environment() -> dict[str, str]:
    """The environment for a child: without secrets that are none of its business."""
    kept = {name: value for name, value in os.environ.items() if name != "HEXLLM_API_KEYS"}
    return kept | {"HEX_LLM_PARENT": str(os.getpid())}
