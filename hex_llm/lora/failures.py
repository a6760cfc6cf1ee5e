"""What did not work a moment ago, and is not tried again at once, however often it is asked for."""

import threading
import time
from collections import OrderedDict

from hex_llm.errors import RequestError, ServerError

_MOST = 1024
# A fault of the adapter's is unlikely to be mended soon; one of the network's may pass.
_REQUEST_S, _SERVER_S = 30.0, 5.0


class Failures:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: OrderedDict[str, tuple[float, RequestError | ServerError]] = OrderedDict()

    def remember(self, key: str, error: RequestError | ServerError) -> None:
        """For a while, which does not begin anew with everybody who is told."""
        with self._lock:
            if self._find(key) is not None:
                return
            self._errors[key] = time.monotonic() + (_REQUEST_S if isinstance(error, RequestError) else _SERVER_S), error
            self._errors.move_to_end(key)
            if len(self._errors) > _MOST:
                self._errors.popitem(last=False)

    def check(self, key: str) -> None:
        """Raises what was remembered, as another one: it would keep all frames that it is raised through."""
        with self._lock:
            error = self._find(key)
        if error is not None:
            raise type(error)(str(error))

    def _find(self, key: str) -> RequestError | ServerError | None:
        until, error = self._errors.get(key, (0.0, None))
        return error if time.monotonic() < until else None
