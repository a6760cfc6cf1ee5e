"""The Hugging Face Hub, or what has its interface: its files, its cache, and its environment variables.

huggingface_hub says what the variables mean (HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE) and who is
logged in. Files are downloaded by `ranges`, as those of Cloud Storage are, to where huggingface_hub would put them and
would find them.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hex_llm.download.patience import Patience
from hex_llm.download.reference import OnHub
from hex_llm.download.remote_file import Digest, RemoteFile
from hex_llm.download.site import Site
from hex_llm.download.source import Listing
from hex_llm.download.store import Store
from hex_llm.errors import ConfigError, DownloadError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HEX = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class HubSettings:
    endpoint: str
    cache: Path
    token: str | None
    offline: bool

    @classmethod
    def of_environment(cls, cache: Path | None) -> "HubSettings":
        # Takes a second to import, which only those wait for who name a model of the hub.
        from huggingface_hub import constants, get_token

        endpoint, token = constants.ENDPOINT, get_token()
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"HF_ENDPOINT={endpoint} is no address: those begin with http:// or https://.")
        if token and not (token.isascii() and token.isprintable()):
            raise ConfigError("The token for the hub has a character that no token has: see HF_TOKEN.")
        return cls(endpoint, cache or Path(constants.HF_HUB_CACHE), token, constants.HF_HUB_OFFLINE)


class HubSource:
    def __init__(self, reference: OnHub, settings: HubSettings):
        self._reference = reference
        self._settings = settings
        self.offline = settings.offline
        name = f"models--{reference.id.replace('/', '--')}"
        self.store = Store(settings.cache / name, settings.cache / ".locks" / name / "hex-llm.lock")
        headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
        known = "HF_TOKEN is of somebody who may not read it" if settings.token else "HF_TOKEN may be needed"
        hint = f"It does not exist, or is not for everybody: {known}."
        self.site = Site(settings.endpoint, lambda: headers, {401: hint, 403: hint, 404: hint})

    def __str__(self) -> str:
        return str(self._reference)

    def kept(self) -> Path | None:
        revision = self._reference.revision
        version = revision if _COMMIT.fullmatch(revision) else self.store.version_of(revision)
        folder = self.store.snapshot(version) if version else None
        return folder if folder and folder.is_dir() else None

    def list(self, patience: Patience) -> Listing:
        id, revision = self._reference.id, self._reference.revision
        url = f"{self._settings.endpoint}/api/models/{id}/revision/{quote(revision, safe='')}?blobs=true"
        info = self.site.get_json(str(self), url, patience)
        commit, siblings = info.get("sha"), info.get("siblings")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise DownloadError(f"{self}: {self._settings.endpoint} does not tell its commit and its files.")
        files = (self._file(commit, each) for each in siblings if isinstance(each, dict))
        ref = revision if commit != revision else None
        return Listing(commit, {file.name: file for file in files if file is not None}, ref)

    def _file(self, commit: str, entry: dict[str, Any]) -> RemoteFile | None:
        match entry:
            case {"rfilename": str(name), "lfs": {"sha256": str(value), "size": int(size)}}:
                digest = Digest("sha256", value)
            case {"rfilename": str(name), "blobId": str(value), "size": int(size)}:
                digest = Digest("git", value)
            case {"rfilename": str(name)}:
                raise DownloadError(f"{self}: {self._settings.endpoint} does not tell the size and digest of {name}.")
            case _:
                return None
        if not _HEX.fullmatch(digest.value) or size < 0:
            raise DownloadError(f"{self}: {self._settings.endpoint} gives {name} a digest or a size that is none.")
        url = f"{self._settings.endpoint}/{self._reference.id}/resolve/{commit}/{quote(name)}"
        return RemoteFile(name, f"{self}/{name}", url, size, digest, digest.value)
