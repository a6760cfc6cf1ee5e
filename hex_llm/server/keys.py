"""API keys: who may use the server.

Keys are kept as SHA-256 digests, and a key that comes is compared with all of them, so that the time it takes tells
nothing. Nothing here ever names a key: a key's id is its digest in hex, of which logs have the beginning.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from hex_llm.config import Config
from hex_llm.errors import ConfigError, Unauthorized

logger = logging.getLogger(__name__)

VARIABLE = "HEXLLM_API_KEYS"
_MISSPELT = ("HEX_LLM_API_KEYS", "HEX_LLM_API_KEY")
_OF_CLIENTS = "HEXLLM_API_KEY"  # as in the playground's programs

_KEY = re.compile(r"[\x21-\x7e]{1,1024}")
_SHOULD_BE = "a key is 1 to 1024 printable ASCII characters without spaces"


class Keys:
    """The keys of a server. Without any, everybody is served."""

    def __init__(self, path: str | None, listed: str | None):
        self._path = path
        self._listed = listed
        self._digests = _read(path, listed)

    @classmethod
    def load(cls, config: Config, environ: Mapping[str, str]) -> "Keys":
        keys = cls(config.api_key_file, environ.get(VARIABLE))
        for name in _MISSPELT if keys else (*_MISSPELT, _OF_CLIENTS):
            if name in environ:  # or the server would be open to everybody
                raise ConfigError(f"{name} is set, but it is {VARIABLE} that the keys are read from.")
        return keys

    def __len__(self) -> int:
        return len(self._digests)

    def reload(self) -> None:
        """Reads the file again. If it is bad, the log says so, and the keys stay as they were."""
        try:
            self._digests = _read(self._path, self._listed)
        except ConfigError as error:
            logger.error("%s The API keys stay as they were.", error)
        else:
            logger.info("API keys read again: %d.", len(self._digests))

    def check(self, authorization: str | None) -> str | None:
        """The id of the key in an Authorization header; None where no keys are needed."""
        if not self._digests:
            return None
        if not authorization:
            raise Unauthorized("An API key is needed: send it in the header 'Authorization: Bearer KEY'.")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("The Authorization header must have the form 'Bearer KEY'.")
        digest = _digest(key.strip())
        known = False
        for each in self._digests:
            known |= hmac.compare_digest(each, digest)
        if not known:
            raise Unauthorized("The API key is not one of this server's.")
        return digest.hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _read(path: str | None, listed: str | None) -> tuple[bytes, ...]:
    keys = _from_file(path) if path is not None else []
    if listed is not None:
        keys += _from_variable(listed)
    return tuple(dict.fromkeys(map(_digest, keys)))


def _from_file(path: str) -> list[str]:
    try:
        # An encoding that takes all bytes: a byte that is no key's is then found in its line.
        lines = Path(path).read_text(encoding="latin-1").split("\n")
    except OSError as error:
        raise ConfigError(f"--api_key_file={path} cannot be read: {error.strerror}.") from None
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not _KEY.fullmatch(line):
            raise ConfigError(f"--api_key_file={path}, line {number}: {_SHOULD_BE}.")
        keys.append(line)
    if not keys:
        raise ConfigError(f"--api_key_file={path} has no keys; leave the flag out to serve everybody.")
    return keys


def _from_variable(listed: str) -> list[str]:
    keys = [key.strip() for key in listed.split(",")]
    for number, key in enumerate(keys, 1):
        if not key and len(keys) == 1:
            raise ConfigError(f"{VARIABLE} is set, but has no keys; unset it to serve everybody.")
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{VARIABLE}, key {number} of {len(keys)}: {_SHOULD_BE}.")
    return keys
