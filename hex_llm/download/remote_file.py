"""A file that lies elsewhere, and how one knows that a copy of it is right."""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_CHUNK = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Digest:
    """sha256 as the hub has it of large files, git's sha1 as it has of others; crc32c as Cloud Storage has it."""

    kind: Literal["sha256", "git", "crc32c"]
    value: str

    def of(self, path: Path) -> str:
        """The same kind of digest, of a file here."""
        match self.kind:
            case "sha256":
                with path.open("rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest()
            case "git":
                digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
                for chunk in _chunks(path):
                    digest.update(chunk)
                return digest.hexdigest()
            case "crc32c":
                import google_crc32c  # an extra, which is there where Cloud Storage is asked

                checksum = 0
                for chunk in _chunks(path):
                    checksum = google_crc32c.extend(checksum, chunk)
                return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`full_name` is for messages; `blob` the name of its content in a cache, another one where the content is."""

    name: str
    full_name: str
    url: str
    size: int
    digest: Digest
    blob: str
