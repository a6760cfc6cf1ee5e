"""Python runs this when it starts, where the folder is on its path: an engine then looks whenever it is idle, and not
once a minute, whether it has lost anything; also whether anything is still on its way between it and others."""

import sys
import time
from collections.abc import Iterator
from typing import Any

if "hex_llm.engine_process" in sys.orig_argv:
    from hex_llm.engine import host
    from hex_llm.engine.engine import Engine
    from hex_llm.engine.handover import PARTS_IN_FLIGHT

    _WORDS_S = 1.0  # that words may be under way which give back what is not needed any more

    def left(handovers: Any) -> Iterator[str]:
        """What is there that an idle engine does not have."""
        outgoing, porter = handovers._outgoing, handovers._porter
        askers = list(porter._giving._askers)
        if outgoing._requests or outgoing._asked:
            yield "requests that are to be handed over"
        if porter._fetching._fetches:
            yield "blocks that are fetched"
        if any(asker.requests for asker in askers):
            yield "requests that others ask for"
        if any(asker.num_staged for asker in askers):
            yield "parts that others get"
        if any(len(asker._free) < PARTS_IN_FLIGHT for asker in askers):
            yield "parts that others have not given back"

    check_engine = Engine.check

    def check_all(engine: Any) -> None:
        check_engine(engine)
        if engine._handovers is not None and engine.is_idle:
            deadline = time.monotonic() + _WORDS_S
            while (found := list(left(engine._handovers))) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not found, f"an idle engine has {', and '.join(found)}"

    host._CHECK_S = 0.0
    Engine.check = check_all
