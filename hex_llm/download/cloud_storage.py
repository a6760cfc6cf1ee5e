"""Google Cloud Storage, by its JSON interface, with the credentials that Google's own tools would take.

STORAGE_EMULATOR_HOST names another server, which is asked without any.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hex_llm.download.patience import Patience
from hex_llm.download.reference import InBucket
from hex_llm.download.remote_file import Digest, RemoteFile
from hex_llm.download.site import Site
from hex_llm.download.source import Listing
from hex_llm.download.store import Store
from hex_llm.errors import ConfigError, DownloadError

_ADDRESS = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_FIELDS = "nextPageToken,items(name,size,generation,crc32c)"


class BucketSource:
    offline = False

    def __init__(self, reference: InBucket, cache: Path):
        try:
            import google_crc32c  # noqa: F401 (for digests; what is missing is told now)
        except ImportError:
            raise ConfigError(f"{reference} needs an extra: pip install '.[gcs]' in a checkout.") from None
        self._reference = reference
        name = "--".join(["gs", reference.bucket, hashlib.sha256(reference.path.encode()).hexdigest()[:16]])
        self.store = Store(cache / name, cache / ".locks" / f"{name}.lock")
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        if emulator:
            address, identify = emulator if "://" in emulator else f"http://{emulator}", dict
        else:
            address, identify = _ADDRESS, _credentials()
        nobody = identify is dict
        who = "No credentials were found, so it was asked as anybody" if nobody else "The account may not read it"
        hint = f"{who}: see Application Default Credentials."
        self.site = Site(address, identify, {401: hint, 403: hint})

    def __str__(self) -> str:
        return str(self._reference)

    def kept(self) -> Path | None:
        return None  # anybody may have written to the bucket since

    def list(self, patience: Patience) -> Listing:
        objects: list[dict[str, Any]] = []
        token = ""
        while True:
            query = {"prefix": self._reference.prefix, "delimiter": "/", "fields": _FIELDS}
            page = self.site.get_json(str(self), self._url(**query, **{"pageToken": token} if token else {}), patience)
            objects += [each for each in page.get("items", ()) if isinstance(each, dict)]
            token = page.get("nextPageToken", "")
            if not token:
                break
        files = [self._file(each) for each in objects if each.get("name") != self._reference.prefix]
        if not files:
            raise DownloadError(f"{self} has no files.", status=404)
        version = hashlib.sha256("\n".join(sorted(file.blob for file in files)).encode()).hexdigest()[:40]
        return Listing(version, {file.name: file for file in files})

    def _file(self, entry: dict[str, Any]) -> RemoteFile:
        match entry:
            case {"name": str(name), "size": str(size), "generation": str(generation), "crc32c": str(crc32c)} if (
                size.isdecimal()
            ):
                pass
            case _:
                raise DownloadError(f"{self}: {self.site.address} tells no size, generation or crc32c of an object.")
        url = self._url(name, alt="media", generation=generation)
        blob = hashlib.sha256(f"{name}\n{generation}".encode()).hexdigest()[:40]
        full_name = f"gs://{self._reference.bucket}/{name}"
        return RemoteFile(
            name.removeprefix(self._reference.prefix), full_name, url, int(size), Digest("crc32c", crc32c), blob
        )

    def _url(self, name: str | None = None, /, **query: str) -> str:
        which = "" if name is None else f"/{quote(name, safe='')}"
        return f"{self.site.address}/storage/v1/b/{self._reference.bucket}/o{which}?{urlencode(query)}"


def _credentials() -> Callable[[], Mapping[str, str]]:
    """What makes the headers that say who asks, anew when they expire; `dict`, which makes none, for nobody."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.auth.transport.requests import Request

    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError:
        return dict
    lock = threading.Lock()

    def identify() -> dict[str, str]:
        headers: dict[str, str] = {}
        with lock:
            try:
                credentials.before_request(Request(), "GET", _ADDRESS, headers)
            except GoogleAuthError as error:
                reason = " ".join(str(error).split())[:300]
                raise DownloadError(f"The credentials for Cloud Storage are of no use: {reason}.") from None
        return headers

    return identify
