"""The numbers of a model: everything its functions need to know besides its weights."""

from dataclasses import dataclass
from typing import Any

from hex_llm.errors import ConfigError
from hex_llm.layers.rope import LinearScaling, Llama3Scaling, Rope
from hex_llm.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    architecture: str  # as config.json names it, and as the registry does
    vocab_size: int
    embed_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens of context the model was made for
    norm_eps: float
    rope: Rope
    tied: bool  # the output head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    window: int | None = None  # how many of the last tokens a token sees; None: all

    @property
    def rope_switch(self) -> int | None:
        """How many tokens a sequence may have before its rope changes; None: it never does."""
        return None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension that a weight can have."""
        return {
            "vocab": self.vocab_size,
            "embed": self.embed_size,
            "heads": self.num_heads * self.head_dim,
            "kv_heads": self.num_kv_heads * self.head_dim,
            "mlp": self.mlp_size,
        }

    def check_shards(self, num_shards: int) -> None:
        """Refuses a number of shards that would cut through a head or leave a remainder."""
        counts = {
            "attention heads": self.num_heads,
            "key and value heads": self.num_kv_heads,
            "mlp columns": self.mlp_size,
            "vocabulary entries": self.vocab_size,
        }
        for what, count in counts.items():
            if count % num_shards:
                raise ConfigError(f"--tensor_parallel_size={num_shards} does not divide the model's {count} {what}.")


_MOST_LAYERS = 1024  # a bound, so that a damaged config is refused rather than unrolled


def read_arch(fields: Fields, architecture: str, *, num_kv_heads: int | None = None, **differences: Any) -> Arch:
    """The numbers that every config.json of a plain decoder has; what a family adds to them is given.

    `num_kv_heads` is how many there are where the file does not say: as many as other heads, if not given.
    """
    embed_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"is {num_kv_heads}, which does not divide the {num_heads} heads")
    if not fields.has("head_dim") and embed_size % num_heads:
        raise fields.refuse("hidden_size", f"is {embed_size}, which {num_heads} heads do not divide")
    head_dim = fields.integer("head_dim", max(embed_size // num_heads, 1))
    if head_dim % 2:
        raise fields.refuse("head_dim", f"is {head_dim}, and rotary embedding needs it even")
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.refuse("hidden_act", f"is {activation!r}; this architecture is served with silu only")
    return Arch(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        embed_size=embed_size,
        mlp_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", largest=_MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, head_dim),
        tied=fields.flag("tie_word_embeddings", False),
        **differences,
    )


def read_rope(fields: Fields, head_dim: int) -> Rope:
    """The rotary embedding of a config, in the spelling of transformers 4 or of transformers 5."""
    theta = fields.number("rope_theta", 10000.0)
    named = {
        name: section for name in ("rope_parameters", "rope_scaling") if (section := fields.section(name)) is not None
    }
    ropes = {name: _read_scaled_rope(section, head_dim, theta) for name, section in named.items()}
    if len(set(ropes.values())) > 1:
        raise fields.refuse("rope_scaling", "and rope_parameters say different things")
    return next(iter(ropes.values()), Rope(head_dim, theta))


def _read_scaled_rope(fields: Fields, head_dim: int, theta: float) -> Rope:
    theta = fields.number("rope_theta", theta)
    spelling = "rope_type" if fields.has("rope_type") else "type"
    kind = fields.text(spelling, "default")
    if fields.has("partial_rotary_factor") and fields.number("partial_rotary_factor") != 1:
        raise fields.refuse("partial_rotary_factor", "is not 1, and heads are rotated as a whole")
    match kind:
        case "default":
            return Rope(head_dim, theta)
        case "linear":
            return Rope(head_dim, theta, LinearScaling(fields.number("factor")))
        case "llama3":
            scaling = Llama3Scaling(
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_max_position=fields.integer("original_max_position_embeddings"),
            )
            if scaling.low_freq_factor > scaling.high_freq_factor:
                raise fields.refuse("low_freq_factor", "is above high_freq_factor")
            return Rope(head_dim, theta, scaling)
        case _:
            raise fields.refuse(spelling, f"is {kind!r}; this version has default, linear and llama3")
