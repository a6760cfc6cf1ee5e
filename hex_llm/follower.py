"""The process of a host that follows: it builds what rank 0 builds, and runs the steps that rank 0 says."""

import gc
import logging
import sys

from hex_llm.errors import HexError, StartError
from hex_llm.launch.task import Task
from hex_llm.process import ENGINE_DIED
from hex_llm.runner.followers import JOIN_S, Leader, Replica, Runs, follow
from hex_llm.runner.libtpu_lock import check_libtpu_lock

logger = logging.getLogger(__name__)


def replica_of(task: Task, key: bytes) -> Replica:
    return Replica(task.engines[0].replica, task.num_ranks, task.steps, key)


def run_follower(task: Task, key: bytes) -> int:
    """Follows for as long as rank 0 is there; returns the exit code. What goes wrong is told to rank 0, too."""
    try:
        leader = Leader(replica_of(task, key), task.rank, timeout=JOIN_S)
    except StartError as error:
        print(f"hex-llm: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    try:
        runner = _build(task)
    except HexError as error:
        code = error.exit_code if isinstance(error, StartError) else 1
        leader.fail(f"could not start: {error}", code)
        return code
    except Exception as error:
        logger.critical("The engine could not start.", exc_info=True)
        leader.fail(f"could not start: {type(error).__name__}: {error}", 1)
        return 1
    try:
        follow(leader, runner)
    except Exception as error:
        logger.critical("A step failed, and the engine with it.", exc_info=True)
        leader.fail(f"has failed in a step: {type(error).__name__}: {error}", ENGINE_DIED)
    return ENGINE_DIED


def _build(task: Task) -> Runs:
    check_libtpu_lock()
    from hex_llm.build import build_runner, find_model
    from hex_llm.parallel.hosts import join_hosts

    join_hosts(task.coordinator, num_hosts=task.num_ranks, rank=task.rank, timeout=JOIN_S)
    config = task.engines[0].config
    runner, _ = build_runner(config, find_model(config))
    # What a start leaves behind stays: to look through it again and again would hold up a step each time.
    gc.collect()
    gc.freeze()
    return runner
