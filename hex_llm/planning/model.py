"""The model that a plan is for: known by its name, or a folder with its config.json."""

from dataclasses import dataclass
from pathlib import Path

from hex_llm.catalog.entry import Entry
from hex_llm.catalog.index import ENTRIES, find, near
from hex_llm.errors import ConfigError
from hex_llm.model_fields import Fields
from hex_llm.model_files import read_json
from hex_llm.planning.precision import NARROW_COLUMNS, Cache, Precision, Weights, has_rounded_tokens, read_precision
from hex_llm.planning.shape import Shape, read_shape

# What --quantization can say, and how weights are kept then. AWQ is a checkpoint of its own, which needs no flag.
WAYS: dict[str, Weights] = {
    "none": "bf16",
    "awq": "int4",
    "int4": "int4",
    "w4a8": "w4a8",
    "int8": "int8",
    "w8a8": "w8a8",
    "fp8": "fp8",
}

# As models/registry has them, which cannot be imported without JAX; a test compares.
SERVED = frozenset({*(entry.architecture for entry in ENTRIES), "Llama4ForCausalLM"})


@dataclass(frozen=True, slots=True)
class Model:
    name: str  # as it was given
    parameters: int
    shape: Shape
    precision: Precision
    flag: str | None  # the server's --quantization
    needs_other_files: bool  # a checkpoint that has its weights so, which the one named has not


def read_model(name: str, quantization: str | None, cache: Cache) -> Model:
    """`quantization` as in WAYS; None: as the checkpoint is."""
    if entry := _known(name):
        config, source, parameters = entry.config, entry.name, entry.parameters
    elif Path(name).is_dir():
        path = Path(name) / "config.json"
        config, source, parameters = read_json(path), str(path), None
        _check_architecture(Fields(source, config))
    else:
        raise ConfigError(f"No model is called {name[:200]!r}, and no folder; {_hint(name)}")
    shape, own = read_shape(config, source), read_precision(config, source)
    weights = own if quantization is None else WAYS[quantization]
    if own == "int4" and weights == "w4a8":
        if not has_rounded_tokens(config, source):
            raise ConfigError(
                f"--quantization=w4a8: {name} has no whole numbers of 4 bits in groups of {NARROW_COLUMNS} columns,"
                " or a multiple of those, that follow each other, so no tokens would be rounded; leave the flag out."
            )
    elif own not in ("bf16", weights):
        raise ConfigError(f"--quantization={quantization}: {name} is in {own} already; leave the flag out.")
    return Model(
        name=name,
        parameters=parameters or shape.parameters,
        shape=shape,
        precision=Precision(weights, cache, experts_only=weights == "mxfp4"),
        needs_other_files=own == "bf16" and quantization == "awq",
        flag=_flag(own, quantization),
    )


def _flag(own: Weights, quantization: str | None) -> str | None:
    """What the server is told. Only w4a8 is more than what a checkpoint in as many bits says by itself."""
    brought = own == "bf16" and quantization not in ("none", "awq")
    return quantization if brought or quantization == "w4a8" else None


def _known(name: str) -> Entry | None:
    """Llama 3.1 had another name on the Hub once, which still works there and is in Hex-LLM's guides."""
    return find(name) or find(name.replace("/Meta-Llama-3.1-", "/Llama-3.1-"))


def _check_architecture(fields: Fields) -> None:
    named = fields.texts("architectures")
    if not named or named[0] not in SERVED:
        what = f"is {named[0][:60]!r}" if named else "is missing"
        raise fields.refuse("architectures", f"{what}, and those served are {', '.join(sorted(SERVED))}")


def _hint(name: str) -> str:
    meant = " or ".join(near(name))
    return f"did you mean {meant}?" if meant else "`hex-llm models` lists those that are known."
