"""Brings adapters from wherever they lie to the engine: fetched, read, checked, packed for its devices, and with all
its hosts."""

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from hex_llm.engine.carrier import AdapterHere, AdapterLost, FromCarrier
from hex_llm.errors import AdapterError, RequestError, ServerError
from hex_llm.loader.adapters import Pair
from hex_llm.lora.adapter import Modules, open_adapter
from hex_llm.lora.store import Store
from hex_llm.runner.packed_adapter import PackedAdapter

logger = logging.getLogger(__name__)

_THREADS = 4  # most of the time each waits for a disk or a network
_ON_THEIR_WAY = 4  # packed adapters beside those that are kept
_LOOK_S = 0.02  # between two looks whether there is room


class AdapterCarrier:
    """A `Carrier`. Of packed adapters it keeps the `kept` that were asked for last; the engine may have a few more that
    it has not loaded yet.
    """

    def __init__(
        self,
        store: Store,
        modules: Modules,
        max_rank: int,
        pack: Callable[[Mapping[str, Pair]], PackedAdapter],
        say: Callable[[FromCarrier], None],
        *,
        kept: int,
    ):
        self._store = store
        self._modules = modules
        self._max_rank = max_rank
        self._pack = pack
        self._say = say
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        self._packed: OrderedDict[str, PackedAdapter] = OrderedDict()  # the least lately used first
        self._kept = kept
        self._room = threading.Semaphore(kept + _ON_THEIR_WAY)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="adapter")

    def fetch(self, identity: str, source: str) -> None:
        with self._lock:
            self._wanted.add(identity)
        self._pool.submit(self._bring, identity, source)

    def cancel(self, identity: str) -> None:
        with self._lock:
            self._wanted.discard(identity)

    def _bring(self, identity: str, source: str) -> None:
        try:
            packed = self._find(identity, source)
            if packed is None:
                return
            said = AdapterHere(identity, packed)
        except (RequestError, ServerError) as error:
            said = AdapterLost(identity, str(error), error.code or "", error.status)
        except Exception:
            logger.exception("Adapter %s cannot be had, for a fault of ours.", source)
            said = AdapterLost(identity, "The adapter could not be loaded, for a fault of the server's.", "", 500)
        if self._is_wanted(identity):
            self.cancel(identity)
            self._say(said)

    def _find(self, identity: str, source: str) -> PackedAdapter | None:
        """None where it is wanted no longer."""
        with self._lock:
            if (packed := self._packed.get(identity)) is not None:
                self._packed.move_to_end(identity)
                return packed
        if not self._wait_for_room(identity):
            return None
        try:
            with self._store.fetch(source, identity) as fetched:
                packed = self._pack(open_adapter(fetched.folder, self._modules, self._max_rank).read())
        except BaseException as error:
            self._room.release()
            if isinstance(error, AdapterError):
                self._store.refuse(identity, error)
            raise
        weakref.finalize(packed, self._room.release)  # when nobody has it any more
        with self._lock:
            self._packed[identity] = packed
            while len(self._packed) > self._kept:
                self._packed.popitem(last=False)
        return packed

    def _wait_for_room(self, identity: str) -> bool:
        """Whether there is room before it is wanted no longer."""
        while self._is_wanted(identity):
            if self._room.acquire(blocking=False):
                return True
            with self._lock:
                one = self._packed.popitem(last=False) if self._packed else None
            if one is None:  # all are the engine's
                time.sleep(_LOOK_S)
            del one
        return False

    def _is_wanted(self, identity: str) -> bool:
        with self._lock:
            return identity in self._wanted
