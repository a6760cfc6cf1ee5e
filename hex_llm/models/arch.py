"""The numbers of a model: everything its functions need to know besides its weights."""

from dataclasses import dataclass

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.rms import Rms
from hex_llm.kernels.window import Window
from hex_llm.layers.rope import LongScaling, Rope


@dataclass(frozen=True, slots=True)
class Kind:
    """What can differ from layer to layer. Layers of one kind share a compiled function."""

    rope: Rope | None  # None: heads are not rotated
    window: Window | None = None  # None: a token sees all before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    architecture: str  # as config.json names it, and as the registry does
    vocab_size: int
    embed_size: int
    mlp_size: int  # of each expert, where there are experts
    mlp_unit: int = 1  # what a device has of it is a multiple of so many
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens of context the model was made for
    kinds: tuple[Kind, ...]  # one for each layer
    rms: Rms
    tied: bool  # the output head is the embedding
    activation: Activation = "silu"
    query_scale: float  # of the products of queries and keys
    soft_cap: float | None = None  # of attention's scores
    logit_soft_cap: float | None = None
    embed_scale: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # each head of queries and keys is normalised
    norm_rotated: bool = False  # those that are rotated are normalised after it, without a weight
    num_experts: int = 0
    experts_per_token: int = 0
    renormalised: bool = True  # the shares of a token's experts add up to 1
    adapter_rank: int = 0  # of the pairs of matrices by which adapters change weights
    temperature: tuple[float, float] | None = None  # Llama 4's (scale, floor) for queries that are not rotated

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """Those that occur."""
        return tuple(dict.fromkeys(kind.window for kind in self.kinds))

    @property
    def reach(self) -> int | None:
        """The most of the last tokens that a token sees in any layer; None: in some it sees all."""
        return None if None in self.windows else max(window.size for window in self.windows if window is not None)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Those that occur."""
        return tuple(dict.fromkeys(kind.rope for kind in self.kinds if kind.rope is not None))

    @property
    def rope_switch(self) -> int | None:
        """The length beyond which a sequence is rotated as a long one; None: there is no such length."""
        return next(
            (rope.scaling.original_max_position for rope in self.ropes if isinstance(rope.scaling, LongScaling)), None
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension that a weight can have."""
        return {
            "vocab": self.vocab_size,
            "embed": self.embed_size,
            "heads": self.num_heads * self.head_dim,
            "kv_heads": self.num_kv_heads * self.head_dim,
            "sinks": self.num_heads,
            "head": self.head_dim,
            "mlp": self.mlp_size,
            "expert": self.num_experts,
            "rank": self.adapter_rank,
        }
