"""What every config.json of a decoder has."""

from collections.abc import Callable, Sequence
from typing import Any

from hex_llm.kernels.rms import Rms
from hex_llm.kernels.window import Window
from hex_llm.layers.rope import Rope, YarnScaling
from hex_llm.model_fields import LARGEST, Fields
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.rope_fields import read_rope

# Bounds, so that a damaged config is refused rather than unrolled or found too large for any memory.
_MOST_LAYERS = 1024
_WIDEST = 2**20
_LARGEST_HEAD = 2**12
_MOST_TOKENS = 2**28
_SILU = ("silu",)

type Kinds = Callable[[int, Rope], tuple[Kind, ...]]  # of the layers, given their number and the model's rope


def read_arch(
    fields: Fields,
    architecture: str,
    *,
    kinds: Kinds | None = None,  # by default the layers are alike, and see everything
    num_kv_heads: int | None = None,  # where the file does not say: as many as other heads, if not given
    head_dim: int | None = None,  # where the file does not say: the share of a head, if not given
    tied: bool = False,  # where the file does not say
    theta: float = 10000.0,  # where the file does not say
    activations: Sequence[str] = _SILU,  # the names that the family's own has in files
    eps: float = 1e-6,  # where the file does not say
    plus_one: bool = False,
    **differences: Any,
) -> Arch:
    """The numbers of a model; what its family adds to those that all have is given."""
    embed_size, num_heads, num_kv_heads, head_dim = _read_heads(fields, num_kv_heads, head_dim)
    for name in ("hidden_act", "hidden_activation"):
        if fields.has(name) and (activation := fields.text(name)) not in activations:
            raise fields.refuse(name, f"is {activation!r}; this architecture is served with {activations[0]} only")
    rope = differences.pop("rope", None) or read_rope(fields, head_dim, theta=theta)
    num_layers = fields.integer("num_hidden_layers", largest=_MOST_LAYERS)
    max_position = fields.integer("max_position_embeddings", largest=_MOST_TOKENS)
    if isinstance(rope.scaling, YarnScaling):  # files leave the original length there, or write the stretched one
        stretched = rope.scaling.factor * rope.scaling.original_max_position
        if stretched > LARGEST:
            raise fields.refuse("rope_scaling", f"makes a context of {stretched:g} tokens, above {LARGEST}")
        max_position = max(max_position, int(stretched))
    return Arch(
        **{
            "architecture": architecture,
            "vocab_size": fields.integer("vocab_size", largest=_MOST_TOKENS),
            "embed_size": embed_size,
            "mlp_size": fields.integer("intermediate_size", largest=_WIDEST),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position": max_position,
            "kinds": kinds(num_layers, rope) if kinds else (Kind(rope),) * num_layers,
            "rms": Rms(fields.number("rms_norm_eps", eps), plus_one),
            "query_scale": head_dim**-0.5,
            "tied": fields.flag("tie_word_embeddings", tied),
        }
        | differences
    )


def _read_heads(fields: Fields, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int, int]:
    """Sizes of the stream, counts of heads and of those of keys and values, and the size of a head."""
    embed_size = fields.integer("hidden_size", largest=_WIDEST)
    num_heads = fields.integer("num_attention_heads", largest=_WIDEST)
    num_kv_heads = fields.integer("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"is {num_kv_heads}, which does not divide the {num_heads} heads")
    if not fields.has("head_dim") and head_dim is None and embed_size % num_heads:
        raise fields.refuse("hidden_size", f"is {embed_size}, which {num_heads} heads do not divide")
    head_dim = fields.integer("head_dim", head_dim or max(embed_size // num_heads, 1), largest=_LARGEST_HEAD)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"is {head_dim}, and rotary embedding needs it even")
    return embed_size, num_heads, num_kv_heads, head_dim


def language_model(fields: Fields) -> Fields:
    """What the config of a model that also sees says of its language model."""
    text = fields.section("text_config")
    if text is None:
        raise fields.refuse("text_config", "is missing")
    tied = "tie_word_embeddings"
    if not fields.has(tied):
        return text
    # Said of the whole model, it stands over what is said of its part, as in transformers 5.
    return Fields(text.source, {**text.values, tied: fields.flag(tied, False)}, text.prefix)


def windowed(size: int | None) -> Kinds:
    """All layers see so many of the last tokens."""
    window = None if size is None else Window(size)
    return lambda num_layers, rope: (Kind(rope, window),) * num_layers


def read_layer_types(fields: Fields, types: Sequence[str]) -> list[str]:
    """The type of each layer: what the file says, or `types`, of which it may use those that occur there."""
    if not fields.has("layer_types"):
        return list(types)
    named = fields.values["layer_types"]
    known = ("full_attention", *sorted({*types} - {"full_attention"}))
    if not isinstance(named, list) or len(named) != len(types) or any(name not in known for name in named):
        raise fields.refuse("layer_types", f"is not one of {', '.join(known)} for each of the {len(types)} layers")
    return named


def read_rotated(fields: Fields, num_layers: int) -> list[bool]:
    """Whether each layer rotates its heads: 1 in `no_rope_layers` means that it does; without the list, one in so many
    does not."""
    every = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.values.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or any(each not in (0, 1) for each in rotated):
        raise fields.refuse("no_rope_layers", f"is not 0 or 1 for each of the {num_layers} layers")
    return [each == 1 for each in rotated[:num_layers]]
