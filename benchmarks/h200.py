"""Builds, checks and measures what hex-llm promises on one H200, in one go, and says how it came out.

    python -m benchmarks.h200 --json OUT.json [--only serve,step] [--quick] [--budget-s 560]

The model has the shape of Llama-3.1-8B and random weights. Every part is a process of its own with a time limit; what
fails is a row of the table, and the rest goes on. The JSON file is written after every part. On a machine without a
GPU, `--shape tiny` tries the script itself. Flags and sizes are in h200_settings.py, limits in h200_table.py. Exits
with 1 where a part failed; a figure that falls short is only told.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.h200_part import Settings, as_argument
from benchmarks.h200_table import derived, rows, table

ROOT = Path(__file__).parents[1]
_GRACE_S = 5.0  # between the moment by which a part should be done and its end


@dataclass(frozen=True, slots=True)
class Part:
    """`benchmarks.h200_NAME`, and the most seconds it may take."""

    name: str
    limit_s: float
    by_peer: bool = False  # whether torch's interpreter runs it
    memory: str | None = None  # the share of the device's that it takes, if not as much as a server


# In this order; those of a row run side by side, as it is not time that they measure.
GROUPS = (
    (Part("serve", 300),),
    (Part("step", 120),),
    (Part("prefill", 120),),
    (Part("kernel", 60),),
    (Part("peer", 90, by_peer=True),),
    (Part("parity", 120, memory="0.5"), Part("checks", 120)),
    (Part("offline", 330),),
)
PARTS = tuple(part for group in GROUPS for part in group)


def main() -> int:
    arguments = _arguments()
    ends = time.time() + arguments.budget_s
    with tempfile.TemporaryDirectory(prefix="h200_") as temporary:
        scratch = arguments.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        report: dict[str, Any] = {"machine": _machine(), "arguments": sys.argv[1:], "rows": [], "parts": {}}
        for group in GROUPS:
            wanted = [part for part in group if not arguments.only or part.name in arguments.only]
            if not wanted:
                continue
            found = _run_group(wanted, arguments, scratch, ends - time.time() - _GRACE_S)
            report["parts"] |= found
            report["rows"] = rows(_values(report["parts"]), report["parts"])
            report["seconds"] = round(time.time() - ends + arguments.budget_s, 1)
            if arguments.json:
                _write(arguments.json, report)
            print(table(_values(found), found), flush=True)
        print("", table(_values(report["parts"]), report["parts"]), sep="\n")
        if arguments.shape != "8b":
            print(f"These are figures of --shape {arguments.shape}: they say that the script works, and nothing else.")
        for name, part in report["parts"].items():
            for error in part.get("errors", ()):
                print(f"{name}: {error[:400]}")
        seconds = ", ".join(f"{name} {part['seconds']:.0f} s" for name, part in report["parts"].items())
        print(f"{report.get('seconds', 0):.0f} s in all: {seconds}")
    return int(any(part["status"] != "done" for part in report["parts"].values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some of {','.join(names)}")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--shape", choices=("8b", "tiny"), default="8b", help="tiny is for a CPU")
    parser.add_argument("--budget-s", type=float, default=560, help="seconds for all parts together")
    parser.add_argument("--scratch", type=Path, help="keep model, logs, traces and compiled steps in this folder")
    parser.add_argument("--peer-python", help="the interpreter with torch and transformers")
    arguments = parser.parse_args()
    arguments.peer_python = arguments.peer_python or _peer_python(arguments.shape)
    for name in arguments.only or ():
        if name not in names:
            parser.error(f"--only={name} is not one of {', '.join(names)}")
    return arguments


def _peer_python(shape: str) -> str:
    """This one; but on a CPU that of `scripts/setup oracle`, if there is one, whose torch knows no GPU."""
    oracle = ROOT / ".venv-oracle/bin/python"
    return str(oracle) if shape == "tiny" and oracle.exists() else sys.executable


def _run_group(
    parts: Sequence[Part], arguments: argparse.Namespace, scratch: Path, room: float
) -> dict[str, dict[str, Any]]:
    """What became of parts that run side by side."""
    with ThreadPoolExecutor(len(parts)) as pool:
        running = {}
        for part in parts:
            limit = min(part.limit_s, room)
            print(f"{part.name}: at most {limit:.0f} s", flush=True)
            running[part.name] = pool.submit(_run, part, arguments, scratch, limit)
        return {name: future.result() for name, future in running.items()}


def _run(part: Part, arguments: argparse.Namespace, scratch: Path, room: float) -> dict[str, Any]:
    """What became of a part: its figures, and how it ended."""
    if room <= _GRACE_S:
        return {"status": "left out: the time was over", "seconds": 0.0}
    results, log = scratch / f"{part.name}.json", scratch / f"{part.name}.log"
    results.unlink(missing_ok=True)
    settings = Settings(
        plan_name="8b-quick" if arguments.quick and arguments.shape == "8b" else arguments.shape,
        scratch=str(scratch.resolve()),
        results=str(results.resolve()),
        deadline=time.time() + room,
        peer_python=arguments.peer_python,
    )
    python = arguments.peer_python if part.by_peer else sys.executable
    command = [python, "-m", f"benchmarks.h200_{part.name}", as_argument(settings)]
    started = time.monotonic()
    with log.open("wb") as errors:
        # A group of its own, so that with a part everything ends that it has started.
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, start_new_session=True, env=_environment(part))
        try:
            code = process.wait(room + _GRACE_S)
            status = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {room + _GRACE_S:.0f} s"
        finally:
            _end(process)
    found = json.loads(results.read_text()) if results.exists() else {}
    told = {} if status == "done" else {"log": _last(log)}
    if status != "done" and not found.get("errors"):
        found["errors"] = [f"{status}: {told['log'][-300:]}"]
    return {"status": status, "seconds": round(time.monotonic() - started, 1), **found, **told}


def _environment(part: Part) -> dict[str, str]:
    """The tree comes first on the path, wherever it is run from."""
    inherited = os.environ.get("PYTHONPATH")
    changes = {"PYTHONPATH": os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])}
    if part.memory is not None:
        changes["XLA_CLIENT_MEM_FRACTION"] = part.memory
    return os.environ | changes


def _end(process: subprocess.Popen) -> None:
    """With all that it has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        if process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _values(parts: dict[str, Any]) -> dict[str, float]:
    values = {name: value for part in parts.values() for name, value in part.get("figures", {}).items()}
    return values | derived(values)


def _machine() -> dict[str, Any]:
    gpu = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": gpu, "cores": os.cpu_count(), "python": platform.python_version()}


def _write(path: Path, report: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


def _last(log: Path) -> str:
    return "\n".join(line[:300] for line in log.read_text(errors="replace").splitlines()[-25:])


if __name__ == "__main__":
    sys.exit(main())
