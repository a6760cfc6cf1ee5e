"""Python runs this when it starts, where the folder is on its path: the time of day is then as many seconds off as the
file that HEX_LLM_CLOCK names says, whenever anybody asks for it."""

import os
import time

_real, _file = time.time, os.environ["HEX_LLM_CLOCK"]


def _time() -> float:
    with open(_file) as file:  # noqa: PTH123  as quick as it can be
        return _real() + float(file.read())


time.time = _time
