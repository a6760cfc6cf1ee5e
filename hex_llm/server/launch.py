"""From settings to running processes: the port first, then the engine, then whoever answers HTTP.

With one HTTP process that is the process itself; with several it starts them and waits for them. They share the
listening socket, and each has a socket pair with the engine that nobody else can reach.
"""

import errno
import os
import socket
import subprocess
from collections.abc import Sequence

import msgspec

from hex_llm.config import Config
from hex_llm.errors import PortError
from hex_llm.process import hold_signals, start_child
from hex_llm.server.port_owner import port_owner
from hex_llm.server.start_checks import check_files, check_keys, check_open_files
from hex_llm.server.supervise import supervise

BACKLOG = 2048
_STOP_S = 5.0  # that the engine has to end when nobody is connected to it any more


def serve(config: Config) -> int:
    """Serves until it is told to stop; returns the exit code."""
    os.umask(0o077)
    listener = bind(config)
    check_files(config)
    check_keys(config, listener)
    check_open_files(config)
    hold_signals()  # until there is an event loop that takes them
    pairs = [socket.socketpair() for _ in range(config.api_server_count)]
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    engine = start_engine(config, theirs)
    try:
        if config.api_server_count > 1:
            return supervise(config, listener, ours, engine.pid)
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
        hint = f" {port_owner(config.port)} listens there." if error.errno == errno.EADDRINUSE else ""
        raise PortError(f"{where} cannot be listened on: {_reason(error)}.{hint}") from None
    return listener


def start_engine(config: Config, connections: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """The engine's process. It gets the connections, and this process keeps none of them open."""
    files = [each.fileno() for each in connections]
    settings = msgspec.json.encode(config).decode()
    engine = start_child("hex_llm.engine_process", [settings, ",".join(map(str, files))], files)
    for each in connections:
        each.close()
    return engine


def _stop(engine: subprocess.Popen[bytes]) -> None:
    try:
        engine.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "it is not a name"
