"""Every model of the catalog, and how one is found."""

import difflib

from hex_llm.catalog.entry import Entry
from hex_llm.catalog.few_bits import FEW_BITS
from hex_llm.catalog.gemma import GEMMA
from hex_llm.catalog.gpt_oss import GPT_OSS
from hex_llm.catalog.llama import LLAMA
from hex_llm.catalog.mistral import MISTRAL
from hex_llm.catalog.phi import PHI
from hex_llm.catalog.qwen import QWEN
from hex_llm.catalog.smollm3 import SMOLLM3

ENTRIES: tuple[Entry, ...] = (*LLAMA, *SMOLLM3, *MISTRAL, *GEMMA, *PHI, *QWEN, *GPT_OSS, *FEW_BITS)

_BY_NAME = {entry.name.lower(): entry for entry in ENTRIES}
_BY_LAST_NAME = {name.rpartition("/")[2]: entry for name, entry in _BY_NAME.items()}


def find(name: str) -> Entry | None:
    """The model of that name, in capitals or not."""
    return _BY_NAME.get(name.lower())


def near(name: str) -> list[str]:
    """Names that may have been meant, the likeliest first."""
    wanted = name.lower().rpartition("/")[2]
    return [_BY_LAST_NAME[each].name for each in difflib.get_close_matches(wanted, _BY_LAST_NAME, n=3)]
