"""Which method a model's files say that its weights are kept by."""

from collections.abc import Callable
from pathlib import Path

from hex_llm.model_fields import Fields
from hex_llm.model_files import read_json
from hex_llm.quantization.awq import read_awq
from hex_llm.quantization.bitsandbytes import read_bitsandbytes
from hex_llm.quantization.compressed_tensors import read_compressed_tensors
from hex_llm.quantization.fp8 import read_fbgemm_fp8, read_fp8
from hex_llm.quantization.gptq import read_gptq
from hex_llm.quantization.method import Method
from hex_llm.quantization.mxfp4 import read_mxfp4

METHODS: dict[str, Callable[[Fields], Method]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm_fp8,
    "mxfp4": read_mxfp4,
}
_SECTIONS = ("quantization_config", "compression_config")  # of config.json; the second is an older name
# Beside an older config.json, and what is refused by the name of its method.
_FILES = {"quant_config.json": "awq", "quantize_config.json": "gptq", "hf_quant_config.json": "modelopt"}


def quantization_fields(config: Fields, folder: Path | None) -> Fields | None:
    """What a model says of how its weights are kept, wherever it says so; None: nothing."""
    for name in _SECTIONS:
        if (section := config.section(name)) is not None:
            return section
    if (text := config.section("text_config")) is not None and text.has(_SECTIONS[0]):
        return text.section(_SECTIONS[0])
    for name, method in _FILES.items():
        if folder is not None and (path := folder / name).exists():
            return Fields(str(path), {"quant_method": method, **read_json(path)})
    return None


def read_method(fields: Fields) -> Method:
    """The method. Whatever is not read in full is refused by name."""
    # The first configs of bitsandbytes did not have its name.
    unnamed = "bitsandbytes" if fields.has("load_in_8bit") or fields.has("load_in_4bit") else None
    name = fields.text("quant_method", unnamed)
    if name not in METHODS:
        raise fields.refuse("quant_method", f"is {name[:60]!r}; weights are read in {', '.join(METHODS)}")
    return METHODS[name](fields)
