"""The process of one host of one replica, or of several engines: `python -m hex_llm.engine_process TASK`, a `Task` as
JSON.

It connects to the HTTP processes, and lives as long as one of them stays connected; or, on a host of a replica that is
not its first, to the one that is (`follower`). Each of several engines has connections and a thread of its own, and the
first that ends is the end of all.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import msgspec

from hex_llm import log
from hex_llm.channel import Channel, call
from hex_llm.engine.engine import Engine
from hex_llm.engine.host import EngineHost
from hex_llm.engine.wire import Failed, Found, Hello, Ready
from hex_llm.errors import HexError, OutOfMemory, StartError
from hex_llm.follower import replica_of, run_follower
from hex_llm.frames import Broken
from hex_llm.launch.task import EngineTask, Task
from hex_llm.process import CLUSTER_KEY, ENGINE_DIED, begin_child, machine, release_signals
from hex_llm.runner.followers import JOIN_S, Followers
from hex_llm.runner.libtpu_lock import check_libtpu_lock

logger = logging.getLogger("hex_llm.engine_process")  # whose own name is __main__

_BUILDING = threading.Lock()
_TURN_S = 5.0  # after which an engine that waits for another shows that it is alive


def main(settings: str) -> int:
    begin_child()
    faulthandler.enable()  # a crash within a library says where it was
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    release_signals()
    task = msgspec.json.decode(settings, type=Task)
    log.configure(_prefix(task))
    key = os.environ.pop(CLUSTER_KEY, "").encode()
    if task.rank:
        return run_follower(task, key)
    hosts = []
    for own in task.engines:
        channels = _connect(task.fronts, Hello(own.replica, os.getpid(), machine()), key)
        if not channels:
            return ENGINE_DIED
        hosts.append(EngineHost(channels, queue_timeout=own.config.queue_timeout_s))
        hosts[-1].report("starting", 0.0)
    for index in range(1, len(hosts)):
        threading.Thread(target=lambda index=index: _end(_live(task, index, hosts, key)), daemon=True).start()
    return _live(task, 0, hosts, key)


def _live(task: Task, index: int, hosts: Sequence[EngineHost], key: bytes) -> int:
    """One of the engines, from its start to its end; returns the exit code."""
    own, host = task.engines[index], hosts[index]
    threading.current_thread().name = own.config.engine_name(own.replica)
    try:
        with _turn(host):
            engine, ready = _build(task, own, host, key)
    except HexError as error:
        exit_code = error.exit_code if isinstance(error, StartError) else 1
        print(f"hex-llm: {error}", file=sys.stderr, flush=True)
        return _fail(hosts, exit_code)
    except Exception:
        logger.critical("The engine could not start.", exc_info=True)
        return _fail(hosts, 1)
    try:
        host.run(engine, ready)
    except OutOfMemory as error:
        logger.critical("%s", error)
        host.tell_state(engine)  # which counts that
        _fail(hosts, error.exit_code)  # with which the server ends, if these are its last engines
    except Exception:
        logger.critical("A step failed, and the engine with it.", exc_info=True)
    return ENGINE_DIED


def _fail(hosts: Sequence[EngineHost], exit_code: int) -> int:
    """None of the engines is going to be there."""
    for host in hosts:
        host.tell(Failed(exit_code))
    return exit_code


@contextmanager
def _turn(host: EngineHost) -> Iterator[None]:
    """One engine after the other: each has all cores compile, and JAX's settings are those of the whole process. After
    one that fails none has its turn: they would only say the same.
    """
    while not _BUILDING.acquire(timeout=_TURN_S):
        host.report("waiting for another engine", 0.0)
    yield
    _BUILDING.release()


def _end(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)  # threads of XLA may still be at work; nothing of theirs is wanted


def _prefix(task: Task) -> str:
    """What tells the lines of its log from those of others."""
    own, *others = task.engines
    name = "%(threadName)s" if others else own.config.engine_name(own.replica) if own.config.num_engines > 1 else ""
    rank = f"rank {task.rank}" if task.num_ranks > 1 else ""
    words = " ".join(filter(None, (name, rank)))
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


def _build(task: Task, own: EngineTask, host: EngineHost, key: bytes) -> tuple[Engine, Ready]:
    config = own.config
    check_libtpu_lock()
    followers = _gather(task, host, key) if task.num_ranks > 1 else None
    # JAX is imported here, and not before the HTTP processes can see that there is somebody.
    import jax

    from hex_llm.build import adapters_of, build_engine, facts_of, find_model
    from hex_llm.engine.admission import new_request
    from hex_llm.engine.request import SamplingParams
    from hex_llm.parallel.hosts import join_hosts
    from hex_llm.runner.pages import Staging
    from hex_llm.transfer.porter import DevicePorter

    if followers is not None:
        join_hosts(task.coordinator, num_hosts=task.num_ranks, rank=task.rank, timeout=JOIN_S)
    model = find_model(config, host.report)
    modules = adapters_of(model) if config.enable_lora else {}
    host.tell(Found(model.max_model_len, model.arch.vocab_size, modules))
    porters: list[DevicePorter] = []

    def make_porter(staging: Staging) -> DevicePorter:
        porters.append(DevicePorter(own.pages, key, staging, host.hear, path=config.kv_transfer_path))
        return porters[0]

    porter = make_porter if own.pages else None
    engine = build_engine(config, model, host.report, followers, porter, own.devices, host.hear)
    # Ready means that a token has been computed.
    engine.add(new_request("first", [0], SamplingParams(temperature=0, max_tokens=1), engine.limits))
    while engine.has_work:
        engine.step()
    engine.take_begun()
    # What a start leaves behind stays: to look through it again and again would hold up a step each time.
    gc.collect()
    gc.freeze()
    pages = porters[0].address if porters else ""
    return engine, Ready(engine.limits, str(model.dtype), jax.devices()[0].device_kind, pages, facts_of(model))


if __name__ == "__main__":
    _end(main(*sys.argv[1:]))
