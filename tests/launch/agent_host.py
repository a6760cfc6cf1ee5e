"""`hex-llm serve` on a host other than 0, whose processes only write their task down: `agent_host.py FILE FLAGS`."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from hex_llm.command import run_command
from hex_llm.launch import agent
from hex_llm.launch.local import LocalChild
from hex_llm.launch.task import Task
from hex_llm.server import api_server

FILE, FLAGS = Path(sys.argv[1]), sys.argv[2:]


def start_instead(task: Task, environment: dict[str, str]) -> LocalChild:
    """The replica's number is how the process ends; that of 0 stays."""
    with FILE.open("ab") as file:
        file.write(msgspec.json.encode({"task": task, "environment": environment}) + b"\n")
    replica = task.engines[0].replica
    ends = f"os._exit({replica})" if replica else "time.sleep(600)"
    code = f"import os, time; from hex_llm.process import begin_child; begin_child(); {ends}"
    parent = {"HEX_LLM_PARENT": str(os.getpid())}
    return LocalChild(
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=os.environ | parent)
    )


if __name__ == "__main__":
    agent.start_engine = start_instead
    sys.exit(run_command(api_server.main, FLAGS))
