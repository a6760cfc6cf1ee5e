"""What a server looks at before it loads anything: files that flags name, keys, and what the machine grants it."""

import ipaddress
import logging
import os
import resource
import socket
import ssl

from hex_llm import faults
from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.flags import flags_of
from hex_llm.server.keys import Keys

logger = logging.getLogger(__name__)

_OTHER_FILES = 256  # beside connections: libraries, weights, sockets to the other processes


def check_files(config: Config) -> None:
    for name in ("chat_template", "ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"--{name}={path} is not a file that can be read.")
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise ConfigError("--ssl_certfile and --ssl_keyfile belong together; only one is given.")
    if config.ssl_certfile is not None:
        _check_certificate(config.ssl_certfile, config.ssl_keyfile)
    folder = config.cache_folder
    if folder is not None and folder.is_dir() and folder.stat().st_mode & 0o022:
        logger.warning("Other users can write to %s, and so decide what is run: chmod 700 it.", folder)


def check_keys(config: Config, listener: socket.socket) -> None:
    """Warns of a server that anybody can use. Vertex AI, which sets AIP_HTTP_PORT, has a door of its own in front."""
    keys = Keys.load(config, os.environ)
    host = listener.getsockname()[0]
    if not len(keys) and "AIP_HTTP_PORT" not in os.environ and not ipaddress.ip_address(host).is_loopback:
        logger.warning(
            "Whoever can reach %s can use this server: no API keys are set (--api_key_file, HEXLLM_API_KEYS).", host
        )


def check_adapters(config: Config) -> None:
    """Warns of flags that nothing comes of."""
    if config.enable_lora and not (config.lora_modules or config.lora_allowed_prefixes):
        logger.warning(
            "--enable_lora: no request can name an adapter without --lora_modules, or --lora_allowed_prefixes for those"
            " that requests bring."
        )
    for flag in () if config.enable_lora else flags_of(Config):
        if flag.group == "Dynamic LoRA" and (value := getattr(config, flag.name)) != flag.default:
            logger.warning("%s changes nothing without --enable_lora.", flag.show(value))


def check_faults(config: Config, listener: socket.socket) -> None:
    """Faults on purpose are for a server that nobody relies on: without keys, and out of others' reach."""
    if not (text := os.environ.get(faults.VARIABLE)):
        return
    faults.parse(text)
    if len(Keys.load(config, os.environ)):
        raise ConfigError(
            f"{faults.VARIABLE} is set, and so are API keys: a server with users has no faults on purpose."
        )
    if not ipaddress.ip_address(host := listener.getsockname()[0]).is_loopback:
        raise ConfigError(f"{faults.VARIABLE} is set, and --host={host} can be reached from elsewhere; use 127.0.0.1.")
    logger.warning("%s=%s: parts of this server fail on purpose.", faults.VARIABLE, text)


def check_no_faults(config: Config) -> None:
    """On each of several hosts: those that follow do not know whether the server has users."""
    if os.environ.get(faults.VARIABLE):
        raise ConfigError(
            f"{faults.VARIABLE} is set, with --num_hosts={config.num_hosts}: faults on purpose are for one host."
        )


def check_open_files(config: Config) -> None:
    """Has the limit on open files be what the connections need, as far as it may be raised."""
    needed = config.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < granted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    if granted < needed:
        logger.warning(
            "This process may open %d files; --max_connections=%d needs %d (ulimit -n).",
            granted, config.max_connections, needed,
        )  # fmt: skip


def _check_certificate(certificate: str, key: str | None) -> None:
    try:
        # A password, even an empty one, keeps OpenSSL from asking the terminal for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # also ssl's
        reason = getattr(error, "reason", None) or error.strerror or "no reason is given"
        raise ConfigError(
            f"--ssl_certfile={certificate} and --ssl_keyfile={key} are no certificate and its key without a password"
            f" ({reason})."
        ) from None
