"""The process of one host of one replica: `python -m hex_llm.engine_process TASK`, a `Task` as JSON.

It connects to the HTTP processes, and lives as long as one of them stays connected; or, on a host of a replica that is
not its first, to the one that is (`follower`).
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from hex_llm import log
from hex_llm.channel import Channel, call
from hex_llm.engine.engine import Engine
from hex_llm.engine.host import EngineHost
from hex_llm.engine.wire import Failed, Found, Hello, Ready
from hex_llm.errors import HexError, StartError
from hex_llm.follower import replica_of, run_follower
from hex_llm.frames import Broken
from hex_llm.launch.task import Task
from hex_llm.process import CLUSTER_KEY, ENGINE_DIED, begin_child, machine, release_signals
from hex_llm.runner.followers import JOIN_S, Followers
from hex_llm.runner.libtpu_lock import check_libtpu_lock

logger = logging.getLogger("hex_llm.engine_process")  # whose own name is __main__


def main(settings: str) -> int:
    begin_child()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    release_signals()
    task = msgspec.json.decode(settings, type=Task)
    log.configure(_name(task))
    key = os.environ.pop(CLUSTER_KEY, "").encode()
    if task.rank:
        return run_follower(task, key)
    channels = _connect(task.fronts, Hello(task.replica, os.getpid(), machine()), key)
    if not channels:
        return ENGINE_DIED
    host = EngineHost(channels, queue_timeout=task.config.queue_timeout_s)
    host.report("starting", 0.0)
    try:
        engine, ready = _build(task, host, key)
    except HexError as error:
        exit_code = error.exit_code if isinstance(error, StartError) else 1
        print(f"hex-llm: {error}", file=sys.stderr, flush=True)
        host.tell(Failed(exit_code))
        return exit_code
    except Exception:
        logger.critical("The engine could not start.", exc_info=True)
        host.tell(Failed(1))
        return 1
    try:
        host.run(engine, ready)
    except Exception:
        logger.critical("A step failed, and the engine with it.", exc_info=True)
    return ENGINE_DIED


def _name(task: Task) -> str:
    """What tells the lines of its log from those of others."""
    replica = task.config.engine_name(task.replica) if task.config.num_engines > 1 else ""
    rank = f"rank {task.rank}" if task.num_ranks > 1 else ""
    words = " ".join(filter(None, (replica, rank)))
    return f"[{words}] " if words else ""


def _connect(fronts: Sequence[str], hello: Hello, key: bytes) -> list[Channel]:
    """To all HTTP processes that are there: of several, one may have ended, and the server is about to."""
    channels = []
    for address in fronts:
        try:
            channel = call(address, key)
            channel.send(hello)
        except (OSError, Broken) as error:
            logger.error("The HTTP process at %s cannot be connected to: %s", address, error)
        else:
            channels.append(channel)
    return channels


def _gather(task: Task, host: EngineHost, key: bytes) -> Followers:
    """The other hosts of the replica, all of them."""
    followers = Followers(replica_of(task, key), failed=lambda code: host.tell(Failed(code)))
    host.before_end = followers.end
    followers.wait(JOIN_S)
    return followers


def _build(task: Task, host: EngineHost, key: bytes) -> tuple[Engine, Ready]:
    config = task.config
    check_libtpu_lock()
    followers = _gather(task, host, key) if task.num_ranks > 1 else None
    # JAX is imported here, and not before the HTTP processes can see that there is somebody.
    import jax

    from hex_llm.build import build_engine, find_model
    from hex_llm.engine.admission import new_request
    from hex_llm.engine.request import SamplingParams
    from hex_llm.parallel.hosts import join_hosts
    from hex_llm.runner.pages import Staging
    from hex_llm.transfer.porter import DevicePorter

    if followers is not None:
        join_hosts(task.coordinator, num_hosts=task.num_ranks, rank=task.rank, timeout=JOIN_S)
    model = find_model(config)
    host.tell(Found(model.max_model_len, model.arch.vocab_size))
    porters: list[DevicePorter] = []

    def make_porter(staging: Staging) -> DevicePorter:
        porters.append(DevicePorter(task.pages, key, staging, host.hear, path=config.kv_transfer_path))
        return porters[0]

    announce = followers and followers.send
    engine = build_engine(config, model, host.report, announce, make_porter if task.pages else None)
    # Ready means that a token has been computed.
    engine.add(new_request("first", [0], SamplingParams(temperature=0, max_tokens=1), engine.limits))
    while engine.has_work:
        engine.step()
    engine.take_begun()
    # What a start leaves behind stays: to look through it again and again would hold up a step each time.
    gc.collect()
    gc.freeze()
    pages = porters[0].address if porters else ""
    return engine, Ready(engine.limits, str(model.dtype), jax.devices()[0].device_kind, pages)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of XLA may still be at work; nothing of theirs is wanted
