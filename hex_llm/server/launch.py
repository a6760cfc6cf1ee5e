"""From settings to running processes: the port first, then the engine, then whoever answers HTTP.

With one HTTP process that is the process itself; with several it starts them and waits for them. They share the
listening socket, and each has a socket pair with the engine that nobody else can reach.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec

from hex_llm.config import Config
from hex_llm.errors import ConfigError, PortError
from hex_llm.process import child_environment

BACKLOG = 2048
_LOOK_S = 0.1  # between two looks at the HTTP processes
_STOP_S = 5.0  # that the engine has to end when nobody is connected to it any more


def serve(config: Config) -> int:
    """Serves until it is told to stop; returns the exit code."""
    listener = bind(config)
    check_files(config)
    pairs = [socket.socketpair() for _ in range(config.api_server_count)]
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    engine = start_engine(config, theirs)
    try:
        if config.api_server_count > 1:
            return _supervise(config, listener, ours, engine)
        # Only now: what it imports would keep the engine waiting.
        from hex_llm.server.front import run_front

        return run_front(config, listener, ours[0], engine.pid)
    finally:
        for each in ours:
            each.close()
        _stop(engine)


def bind(config: Config) -> socket.socket:
    """The listening socket. A port that cannot be had is found out before anything is loaded."""
    where = f"--host={config.host} --port={config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise PortError(f"{where}: the host cannot be looked up ({_reason(error)}).") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        hint = " Another program listens there." if error.errno == errno.EADDRINUSE else ""
        raise PortError(f"{where} cannot be listened on: {_reason(error)}.{hint}") from None
    return listener


def check_files(config: Config) -> None:
    """Files that flags name are looked at before anything is loaded."""
    for name in ("chat_template", "api_key_file", "ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"--{name}={path} is not a file that can be read.")
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise ConfigError("--ssl_certfile and --ssl_keyfile belong together; only one is given.")


def start_engine(config: Config, connections: Sequence[socket.socket]) -> subprocess.Popen:
    """The engine's process. It gets the connections, and this process keeps none of them open."""
    settings = msgspec.json.encode(config).decode()
    return _start(
        "hex_llm.engine_process", [settings, ",".join(str(each.fileno()) for each in connections)], connections
    )


def _start(module: str, arguments: Sequence[str], sockets: Sequence[socket.socket], **more: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        pass_fds=[each.fileno() for each in sockets],
        env=child_environment() | more,
        stdin=subprocess.DEVNULL,
    )
    for each in sockets:
        each.close()
    return process


def _supervise(
    config: Config, listener: socket.socket, connections: Sequence[socket.socket], engine: subprocess.Popen
) -> int:
    """Starts the HTTP processes and waits until all have ended. When one ends, so do the others."""
    settings = msgspec.json.encode(config).decode()
    with tempfile.TemporaryDirectory(prefix="hex-llm-metrics-") as folder:
        fronts = []
        for index, connection in enumerate(connections):
            shared = listener.dup()
            words = [settings, str(shared.fileno()), str(connection.fileno()), str(engine.pid), str(index)]
            front = _start("hex_llm.server.front", words, [shared, connection], PROMETHEUS_MULTIPROC_DIR=folder)
            fronts.append(front)
        listener.close()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: _forward(fronts, number))
        codes: list[int] = []
        while len(codes) < len(fronts):
            time.sleep(_LOOK_S)
            codes = [code for front in fronts if (code := front.poll()) is not None]
            if codes and len(codes) < len(fronts):
                _forward(fronts, signal.SIGTERM)
        return max(codes)


def _forward(processes: Sequence[subprocess.Popen], number: int) -> None:
    for each in processes:
        if each.poll() is None:
            each.send_signal(number)


def _stop(engine: subprocess.Popen) -> None:
    try:
        engine.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "it is not a name"
