"""Tokens in 8 bits, as products with weights of some codings take them, and how they do."""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels import float8
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, Codes, Coding, Packed
from hex_llm.pytree import pytree, static

# Codings whose weights multiply tokens of the weight's own type.
TYPES: dict[Coding, str] = {"fp8": "float8_e4m3fn", "w8a8": "int8", "w4a8": "float8_e4m3fn"}
_RANGES = {"float8_e4m3fn": (-float8.LARGEST, float8.LARGEST), "int8": (-128.0, 127.0)}
TILES = 16  # of 128 columns each, whose sums are multiplied at a time
_ZERO = 2.0**-100  # a row without a larger number is of zeros: what divides by its scale must not overflow


@pytree
class EightBits:
    """That tokens are to come in 8 bits of a type: divided by this scale [], or each by its own.

    `with_sums`: where a kernel brings them to it, with the sums that `Rows` has a place for.
    """

    input_scale: Array | None
    type_name: str = static()
    with_sums: bool = static(default=False)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.type_name)

    def own_scale(self, tokens: Array) -> Array:
        """float32 [..., in] -> [...], by which a token's largest number is the largest of the type; 1 for one of zeros.

        Infinity where there is NaN, too: int8 has no such number, so that the scale must tell. For kernels, too.
        """
        return self.scale_of(jnp.max(self.sizes(tokens), axis=-1))

    def sizes(self, tokens: Array) -> Array:
        """The sizes of float32 numbers, of which the largest tells the scale."""
        sizes = jnp.abs(tokens)
        # XLA's maximum on the CPU can lose a NaN, so that it is not left to the maximum.
        return jnp.where(sizes < jnp.inf, sizes, jnp.inf)

    def scale_of(self, largest: Array) -> Array:
        return jnp.where(largest > _ZERO, largest / _RANGES[self.type_name][1], 1.0)

    def within(self, values: Array) -> Array:
        """float32, of which what is beyond the type's range is cut off. For kernels, too."""
        lowest, largest = _RANGES[self.type_name]
        return jnp.minimum(jnp.maximum(values, lowest), largest)

    def rounded(self, values: Array) -> Array:
        """float32 within the range to the nearest numbers of the type, of two to the even one. For kernels, too."""
        if self.type_name == "int8":
            values = lax.round(values, lax.RoundingMethod.TO_NEAREST_EVEN)
        return values.astype(self.dtype)


@pytree
class Rows:
    """Tokens [M, in] that are there in 8 bits: their numbers are `values * scale`."""

    values: Array  # [M, in]: float8_e4m3fn or int8
    scale: Array  # [M] float32
    type_name: str = static()  # of the tokens that they were made of
    # [2, M, in / 128, up to whole `TILES`] bfloat16: of each 128 numbers of `values` the sum, and what is left of that;
    # zeros past them. None: nobody added them up.
    sums: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """That in which a product with them is given."""
        return jnp.dtype(self.type_name)


type Tokens = Array | Rows


def two_parts(values: Array) -> tuple[Array, Array]:
    """float32 as bfloat16, and what is left of it. Rounded by its bits: a cast there and back XLA takes for none, and a
    GPU casts single numbers at a quarter of the speed of two."""
    bits = (lax.bitcast_convert_type(values, jnp.int32) + 0x8000) & ~0xFFFF
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (values - high).astype(jnp.bfloat16)


def sums_shape(rows: int, width: int) -> tuple[int, int, int]:
    """Of `Rows.sums`."""
    return 2, rows, -(-width // HOPPER_COLUMNS // TILES) * TILES


def taken_by(weight: Codes | Packed) -> EightBits:
    """How a weight of a coding of `TYPES` takes its tokens."""
    with_sums = isinstance(weight, Packed) and weight.layout == "hopper8"
    return EightBits(weight.input_scale, TYPES[weight.coding], with_sums)
