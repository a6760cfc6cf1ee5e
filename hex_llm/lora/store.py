"""Adapters by where they lie: which one a source stands for now, and a folder with its files."""

import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from hex_llm.download.allowed import Allowed
from hex_llm.download.fetch import check_room, open_source
from hex_llm.download.patience import Patience
from hex_llm.download.ranges import download
from hex_llm.download.reference import OnHub, Reference, parse_reference
from hex_llm.download.remote_file import RemoteFile
from hex_llm.download.source import Source
from hex_llm.errors import (
    AdapterError,
    AdapterNotAllowed,
    AdapterNotFound,
    AdapterUnavailable,
    ConfigError,
    DownloadError,
    NoSpace,
    RequestError,
    ServerError,
)
from hex_llm.lora.disk import Disk, Hold
from hex_llm.lora.failures import Failures
from hex_llm.lora.files import chosen, in_folder
from hex_llm.lora.flights import Flights
from hex_llm.progress import size

logger = logging.getLogger(__name__)

_HUB = "hf:"
_LONGEST_SOURCE = 1024
_MOST_KNOWN = 1024
_LIST_S = 30.0  # that a source has to say what it has
_ASK_S = 10.0  # the same, if what it had before would do
_REFUSALS = {400, 401, 403, 404, 410}  # of which the hub and Cloud Storage have several for what does not exist
_TRIES = 3  # to take hold of what was downloaded before another process needs the room


class Fetched:
    """An adapter's files, which stay as long as this is not closed. `identity` is another for every other adapter, and
    for the same source once its files are others.
    """

    def __init__(self, identity: str, folder: Path, let_go: Callable[[], None]):
        self.identity = identity
        self.folder = folder
        self._stack = ExitStack()
        self._stack.callback(let_go)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Known:
    """What a source had when it was last asked."""

    source: Source
    identity: str
    files: tuple[RemoteFile, ...]
    since: float = field(default_factory=time.monotonic)


class Store:
    """A source is gs://BUCKET/PATH, or OWNER/NAME of the hub, with @REVISION and after hf: if one likes; of those
    `named` by who runs the server, also a folder. All others must be under one of the prefixes `allowed`.

    Its methods may be called from several threads, and wait for the network: they are not for an event loop. They raise
    AdapterNotAllowed, AdapterNotFound, AdapterError and AdapterUnavailable. What did not work is not tried again for
    some seconds.
    """

    def __init__(
        self,
        folder: Path,
        allowed: Sequence[str],
        named: Collection[str] = (),
        *,
        most_bytes: int = 20 * 2**30,
        timeout_s: float = 120.0,
        ask_again_s: float = 10.0,
        keep: bool = True,
    ):
        """`folder` has what was downloaded, `most_bytes` at most; without `keep`, only what is in use. A download may
        take `timeout_s`. What a source stands for is asked again after `ask_again_s`.
        """
        self._folder = folder
        self._allowed = Allowed([prefix.removeprefix(_HUB) for prefix in allowed])
        self._named = frozenset(named)
        self._ask_again_s = ask_again_s
        self._keep = keep
        try:
            self._disk = Disk(folder, most_bytes)
        except OSError as error:
            raise ConfigError(f"The folder for adapters, {folder}, cannot be made: {error.strerror}.") from None
        self._asking = Flights(min(timeout_s, _LIST_S))
        self._bringing = Flights(timeout_s)
        self._failures = Failures()
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._users: Counter[str] = Counter()

    def identify(self, source: str) -> str:
        """The identity of what a source stands for now. Nothing is downloaded."""
        place = self._place(source)
        if isinstance(place, Path):
            identity = _identity_of(place)
        else:
            with self._errors(place):
                identity = self._ask(place).identity
        self._failures.check(identity)
        return identity

    def fetch(self, source: str, identity: str | None = None) -> Fetched:
        """What a source stands for now; with an `identity` only that, and nobody is asked if it is here."""
        place = self._place(source)
        if identity is not None and not isinstance(place, Path):
            self._failures.check(identity)
            with self._errors(place):
                if fetched := self._take(identity, self._disk.hold):
                    return fetched
        found = self.identify(source)
        _check_same(source, identity, found)
        if isinstance(place, Path):
            return Fetched(found, place, lambda: None)
        with self._errors(place):
            fetched = self._get(place)
        try:
            _check_same(source, identity, fetched.identity)
        except AdapterUnavailable:
            fetched.close()
            raise
        return fetched

    def refuse(self, identity: str, error: AdapterError) -> None:
        """Has an adapter that was fetched, and found to be of no use, be refused at once for some seconds."""
        self._failures.remember(identity, error)

    def _place(self, source: str) -> Path | Reference:
        name = source.removeprefix(_HUB)
        if source in self._named:
            if Path(source).is_dir():
                return Path(source)
            if reference := parse_reference(name):
                return reference
            raise AdapterNotFound(f"{source} is no folder on the server's machine, and can be nothing else.")
        reference = self._allowed.find(name) if len(source) <= _LONGEST_SOURCE else None
        if reference is None or (name != source and not isinstance(reference, OnHub)):
            raise AdapterNotAllowed(
                f"{source[:100]!a} is neither an adapter that the server was started with (--lora_modules), nor under"
                " one of the prefixes that adapters may be read from (--lora_allowed_prefixes)."
            )
        return reference

    def _ask(self, place: Reference) -> _Known:
        """What a source has now; if it does not answer, what it had before."""
        key = str(place)
        self._failures.check(key)
        with self._lock:
            known = self._known.get(key)
        if known is not None and time.monotonic() - known.since < self._ask_again_s:
            return known
        return self._asking.join(key, lambda patience: self._list(place, known, patience))

    def _list(self, place: Reference, before: _Known | None, patience: Patience) -> _Known:
        source = before.source if before else open_source(place, self._folder)
        if source.offline:
            raise DownloadError(f"HF_HUB_OFFLINE forbids to ask the hub for {place}.")
        try:
            listing = source.list(Patience(_ASK_S) if before else patience)
        except DownloadError as error:
            if before is None or error.status is not None:
                raise
            logger.warning("%s It is taken to be what it was before.", error)
            known = _Known(source, before.identity, before.files)
        else:
            sizes = {name: file.size for name, file in listing.files.items()}
            files = tuple(listing.files[name] for name in chosen(sizes, str(place)))
            # Files, not the version of all that is there: nobody's adapter is another because of a README.
            whose = place.id if isinstance(place, OnHub) else str(place)
            known = _Known(source, _identity(whose, ((file.name, file.size, file.blob) for file in files)), files)
        with self._lock:
            self._known[str(place)] = known
            self._known.move_to_end(str(place))
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return known

    def _get(self, place: Reference) -> Fetched:
        known = self._ask(place)
        try:
            return self._bring(place, known)
        except DownloadError as error:
            if error.status != 404:
                raise
            # A file may have been replaced since its source was asked.
            with self._lock:
                self._known.pop(str(place), None)
            newer = self._ask(place)
            if newer.identity == known.identity:
                raise
        return self._bring(place, newer)

    def _bring(self, place: Reference, known: _Known) -> Fetched:
        def hold(identity: str) -> Hold:
            for _ in range(_TRIES):
                if held := self._disk.hold(identity):
                    return held
                self._bringing.join(identity, lambda patience: self._download(place, known, patience))
            raise NoSpace(f"{place} was removed from {self._folder} as often as it came.")

        fetched = self._take(known.identity, hold)
        assert fetched is not None
        return fetched

    def _download(self, place: Reference, known: _Known, patience: Patience) -> None:
        num_bytes = sum(file.size for file in known.files)
        with self._disk.fill(known.identity, num_bytes, patience) as folder:
            if folder is None:
                return
            missing = {folder / file.name: file for file in known.files if not (folder / file.name).exists()}
            check_room(str(place), missing, folder)
            started = time.monotonic()
            download(missing, known.source.site, patience, lambda _: None)
            logger.info("Adapter %s: %s in %.1f s.", place, size(num_bytes), time.monotonic() - started)

    def _take(self, identity: str, hold: Callable[[str], Hold | None]) -> Fetched | None:
        """Whoever waits for an adapter is one of its users: without `keep`, it must not go when another lets go."""
        with self._lock:
            self._users[identity] += 1
        held = None
        try:
            held = hold(identity)
        finally:
            if held is None:
                self._let_go(identity)
        return held and Fetched(identity, held.folder, partial(self._let_go, identity, held))

    def _let_go(self, identity: str, held: Hold | None = None) -> None:
        if held is not None:
            held.close()
        with self._lock:
            self._users[identity] -= 1
            is_last = not self._users[identity]
            if is_last:
                del self._users[identity]
        if is_last and not self._keep:
            self._disk.remove(identity)

    @contextmanager
    def _errors(self, place: Reference) -> Iterator[None]:
        """Makes what goes wrong on the way what a client is told, and remembers it."""
        try:
            yield
        except (AdapterError, DownloadError, ConfigError, OSError) as error:
            told = error if isinstance(error, AdapterError) else _told(error, place)
            self._failures.remember(str(place), told)
            raise told from None


def _check_same(source: str, wanted: str | None, found: str) -> None:
    if wanted not in (None, found):
        raise AdapterUnavailable(f"{source} has become another adapter in the meantime. Ask again.")


def _told(error: DownloadError | ConfigError | OSError, place: Reference) -> RequestError | ServerError:
    match error:
        case DownloadError(status=int(status)) if status in _REFUSALS:
            return AdapterNotFound(str(error))
        case TimeoutError():
            return AdapterUnavailable(f"{place} could not be had within {error}.")
        case NoSpace():
            logger.warning("%s", error)
            return AdapterUnavailable(f"The server has no room on its disk for {place}.")
        case OSError():
            logger.warning("%s cannot be kept on the disk: %s.", place, error)
            return AdapterUnavailable(f"The server's disk does not take {place}.")
        case _:
            return AdapterUnavailable(str(error))


def _identity_of(folder: Path) -> str:
    stats = in_folder(folder)
    files = ((name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in stats.items())
    return _identity(str(folder.resolve()), files)


def _identity(whose: str, files: Iterable[tuple[str, int, str]]) -> str:
    lines = [whose, *(f"{name} {num_bytes} {version}" for name, num_bytes, version in files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
