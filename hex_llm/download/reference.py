"""What a name that is no folder stands for: a model on the Hugging Face Hub, or a path in Cloud Storage."""

import re
from dataclasses import dataclass

from hex_llm.errors import ConfigError

GS = "gs://"
MAIN = "main"  # the revision that a name without one stands for

# The hub's own rules: letters, digits, and . _ - between them; at most 96 of them.
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class OnHub:
    """A repository of the hub, as of a branch, tag or commit."""

    id: str
    revision: str = MAIN

    def __str__(self) -> str:
        return self.id if self.revision == MAIN else f"{self.id}@{self.revision}"


@dataclass(frozen=True, slots=True)
class InBucket:
    """A folder of a bucket; without a path, the whole bucket."""

    bucket: str
    path: str = ""

    @property
    def prefix(self) -> str:
        """What the names of its objects begin with."""
        return f"{self.path}/" if self.path else ""

    def __str__(self) -> str:
        return f"{GS}{self.bucket}/{self.path}".rstrip("/")


type Reference = OnHub | InBucket


def parse_reference(text: str) -> Reference | None:
    """What `text` names; None where it can be neither. ConfigError for an address of Cloud Storage that is none."""
    if text.startswith(GS):
        return _in_bucket(text)
    id, at, revision = text.partition("@")
    if not _HUB_ID.fullmatch(id) or ".." in id or "--" in id or (at and not _is_revision(revision)):
        return None
    return OnHub(id, revision or MAIN)


def _is_revision(text: str) -> bool:
    return bool(_REVISION.fullmatch(text)) and ".." not in text


def with_revision(reference: OnHub, revision: str) -> OnHub:
    if not _is_revision(revision):
        raise ConfigError(f"--revision={revision[:100]} is no branch, tag or commit.")
    if reference.revision not in (MAIN, revision):
        raise ConfigError(f"--revision={revision} and --model={reference} name two revisions; give one.")
    return OnHub(reference.id, revision)


def _in_bucket(text: str) -> InBucket:
    bucket, _, path = text.removeprefix(GS).partition("/")
    path = path.rstrip("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{text[:200]} names no bucket: gs://BUCKET/PATH is wanted, and BUCKET has 3 letters or more."
        )
    if path and (not path.isprintable() or any(part in ("", ".", "..") for part in path.split("/"))):
        raise ConfigError(f"{text[:200]!r} has an empty, a dotted or an unprintable part in its path.")
    return InBucket(bucket, path)
