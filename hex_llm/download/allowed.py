"""Which sources a request may name: those under prefixes that whoever runs the server has given.

Without such a list any caller could have the server read whatever its account can read.
"""

import re
from collections.abc import Sequence

from hex_llm.download.reference import GS, InBucket, OnHub, Reference, parse_reference
from hex_llm.errors import ConfigError

_SEGMENT = re.compile(r"[A-Za-z0-9._=-]+")


class Allowed:
    """A prefix is gs://BUCKET, with a path or without, of which whole parts are compared; OWNER/NAME on the hub; or
    OWNER/, for all that an owner has there.
    """

    def __init__(self, prefixes: Sequence[str]):
        self._prefixes = [_prefix(text) for text in prefixes]

    def find(self, text: str) -> Reference | None:
        """What a request names; None where that is not allowed, or is nothing that could be."""
        if text.startswith(GS) and not all(map(_SEGMENT.fullmatch, text.removeprefix(GS).rstrip("/").split("/"))):
            return None
        try:
            reference = parse_reference(text)
        except ConfigError:
            return None
        if reference is None or not any(_is_under(reference, prefix) for prefix in self._prefixes):
            return None
        return reference


def _prefix(text: str) -> Reference:
    try:
        reference = parse_reference(text.removesuffix("/"))
    except ConfigError as error:
        raise ConfigError(f"--lora_allowed_prefixes: {error}") from None
    # Of the hub, an owner with a slash or a name without one; all revisions.
    is_odd = isinstance(reference, OnHub) and (("/" in reference.id) == text.endswith("/") or "@" in text)
    if reference is None or is_odd:
        raise ConfigError(
            f"--lora_allowed_prefixes: {text[:200]!r} is no prefix of sources: gs://BUCKET/PATH, OWNER/ or OWNER/NAME"
            " is one."
        )
    return reference


def _is_under(reference: Reference, prefix: Reference) -> bool:
    if isinstance(reference, OnHub) and isinstance(prefix, OnHub):
        return prefix.id in (reference.id, reference.id.partition("/")[0]) and "/" in reference.id
    if isinstance(reference, InBucket) and isinstance(prefix, InBucket):
        return reference.bucket == prefix.bucket and f"{reference.path}/".startswith(prefix.prefix)
    return False
