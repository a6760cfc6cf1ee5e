"""A folder with the files of a model that lies elsewhere: downloaded, if they are not there from before."""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hex_llm.download.cloud_storage import BucketSource
from hex_llm.download.hub import HubSettings, HubSource
from hex_llm.download.patience import Patience
from hex_llm.download.ranges import bytes_missing, download
from hex_llm.download.reference import OnHub, Reference
from hex_llm.download.remote_file import RemoteFile
from hex_llm.download.source import Listing, Source
from hex_llm.download.wanted import Wanted
from hex_llm.errors import DownloadError, NoSpace
from hex_llm.progress import Report, progress, size, tell_nobody

logger = logging.getLogger(__name__)

_SPARE = 64 * 2**20  # that a disk keeps free
_ASK_S = 10.0  # that somebody who has the files already tries to ask for newer ones


def open_source(reference: Reference, cache: Path | None = None) -> Source:
    """`cache` is for downloads of all kinds; without it, the hub's are where its own tools have them."""
    if isinstance(reference, OnHub):
        return HubSource(reference, HubSettings.of_environment(cache))
    return BucketSource(reference, cache or user_cache() / "hex_llm" / "models")


def user_cache() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG rules say to take no notice of a relative path.
    return given if given.is_absolute() else Path.home() / ".cache"


def fetch(source: Source, wanted: Wanted, *, timeout_s: float, report: Report = tell_nobody) -> Path:
    """The folder with the files that are wanted. It blocks, for minutes perhaps: not for an event loop.

    DownloadError where they cannot be had, NoSpace where the disk has no room; CheckpointError where they are not those
    of a model. Several processes may do the same at a time.
    """
    kept = source.kept()
    lacks = f"{source} was never downloaded." if kept is None else wanted.lacking(kept)
    if source.offline and lacks:
        raise DownloadError(f"{lacks} HF_HUB_OFFLINE forbids to ask the hub for it.")
    if source.offline and kept:
        return kept
    try:
        listing = source.list(Patience(timeout_s if lacks else min(timeout_s, _ASK_S)))
    except DownloadError as error:
        if lacks or not kept or error.status is not None:
            raise
        logger.warning("%s What is here from before is taken: %s.", error, kept)
        return kept
    return fetch_listed(source, listing, wanted, timeout_s=timeout_s, report=report)


def fetch_listed(source: Source, listing: Listing, wanted: Wanted, *, timeout_s: float, report: Report) -> Path:
    """The same, of a source that has been asked what it has."""
    wanted.check(listing.files, str(source))
    folder, patience = source.store.snapshot(listing.version), Patience(timeout_s)
    names = wanted.chosen(listing.files)
    _get(source, listing, names, patience, report)
    weights = wanted.chosen_weights(listing.files, folder, str(source))
    _get(source, listing, [*names, *weights], patience, report)
    if listing.ref is not None:
        source.store.remember(listing.ref, listing.version)
    return folder


def _get(source: Source, listing: Listing, names: Sequence[str], patience: Patience, report: Report) -> None:
    """Has files be there, under their names."""
    files, store, version = [listing.files[name] for name in names], source.store, listing.version
    if files and all(store.is_named(version, file) for file in files):  # on a disk that is only read, perhaps
        return
    with store.lock(report):
        store.prepare(version)
        if missing := {store.blob(file): file for file in files if not store.has(version, file)}:
            check_room(str(source), missing, store.folder)
            total = sum(file.size for file in missing.values())
            with progress(f"Downloading {source}", f"Downloaded %s of {source}", total, report) as advance:
                download(missing, source.site, patience, advance)
        for file in files:
            store.link(version, file)


def check_room(what: str, missing: Mapping[Path, RemoteFile], folder: Path) -> None:
    """Before the first byte is written."""
    need = sum(bytes_missing(path, file) for path, file in missing.items())
    free = free_bytes(folder)
    if need + _SPARE > free:
        raise NoSpace(
            f"{what} needs {size(need)} more on the disk of {folder}, and {size(_SPARE)} to spare; {size(free)} are"
            " free. --download_dir names another place."
        )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
