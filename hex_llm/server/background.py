"""Work that a server which ends does not wait for."""

import asyncio
import contextlib
import threading
from collections.abc import Callable


async def in_background[T](work: Callable[[], T]) -> T:
    """As asyncio.to_thread, whose threads keep a process from ending: a download may take minutes."""
    loop, result = asyncio.get_running_loop(), asyncio.Future[T]()

    def settle(outcome: T | BaseException) -> None:
        if result.done():  # nobody waits any more
            return
        if isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)

    def run() -> None:
        try:
            outcome = work()
        except BaseException as error:
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True, name="background").start()
    return await result
