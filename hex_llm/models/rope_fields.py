"""The rotary embedding that a config describes, in the spelling of transformers 4 or of transformers 5."""

import math

from hex_llm.layers.rope import LinearScaling, Llama3Scaling, LongScaling, Rope, Scaling, YarnScaling
from hex_llm.model_fields import Fields

_TYPES = "default, linear, llama3, yarn and longrope"


def read_rope(fields: Fields, head_dim: int, *, theta: float = 10000.0) -> Rope:
    """`theta` is what the model's class has where the file does not say."""
    _check_whole(fields)
    theta = fields.number("rope_theta", theta)
    named = {
        name: section for name in ("rope_parameters", "rope_scaling") if (section := fields.section(name)) is not None
    }
    ropes = {name: read_scaled_rope(fields, section, head_dim, theta) for name, section in named.items()}
    if len(set(ropes.values())) > 1:
        raise fields.refuse("rope_scaling", "and rope_parameters say different things")
    return next(iter(ropes.values()), Rope(head_dim, theta))


def read_scaled_rope(fields: Fields, section: Fields, head_dim: int, theta: float) -> Rope:
    """What one `section` of the config says."""
    for where in (fields, section):
        _check_whole(where)
    return Rope(head_dim, section.number("rope_theta", theta), _scaling(fields, section, head_dim))


def _check_whole(fields: Fields) -> None:
    if fields.has("partial_rotary_factor") and fields.number("partial_rotary_factor") != 1:
        raise fields.refuse("partial_rotary_factor", "is not 1, and heads are rotated as a whole")


def _scaling(fields: Fields, section: Fields, head_dim: int) -> Scaling | None:
    spelling = "rope_type" if section.has("rope_type") else "type"
    match kind := section.text(spelling, "default"):
        case "default":
            return None
        case "linear":
            return LinearScaling(section.number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=section.number("factor"),
                low_freq_factor=section.number("low_freq_factor"),
                high_freq_factor=section.number("high_freq_factor"),
                original_max_position=section.integer("original_max_position_embeddings"),
            )
            if scaling.low_freq_factor > scaling.high_freq_factor:
                raise section.refuse("low_freq_factor", "is above high_freq_factor")
            return scaling
        case "yarn":
            return _yarn(fields, section)
        case "longrope" | "su":
            return _longrope(fields, section, head_dim)
    raise section.refuse(spelling, f"is {kind[:60]!r}; this version has {_TYPES}")


def _yarn(fields: Fields, section: Fields) -> YarnScaling:
    factor = section.number("factor")
    if section.has("attention_factor"):
        amplitude = section.number("attention_factor")
    elif section.has("mscale") and section.has("mscale_all_dim"):
        amplitude = _growth(factor, section.number("mscale")) / _growth(factor, section.number("mscale_all_dim"))
    else:
        amplitude = _growth(factor)
    scaling = YarnScaling(
        factor=factor,
        original_max_position=_original_length(fields, section),
        fast_turns=section.number("beta_fast", 32.0),
        slow_turns=section.number("beta_slow", 1.0),
        whole=section.flag("truncate", True),
        amplitude=amplitude,
    )
    if scaling.slow_turns > scaling.fast_turns:
        raise section.refuse("beta_slow", "is above beta_fast")
    return scaling


def _longrope(fields: Fields, section: Fields, head_dim: int) -> LongScaling:
    original = _original_length(fields, section)
    factor = section.number("factor", fields.integer("max_position_embeddings") / original)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    short, long = (section.numbers(name, head_dim // 2) for name in ("short_factor", "long_factor"))
    return LongScaling(short, long, original, section.number("attention_factor", amplitude))


def _growth(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _original_length(fields: Fields, section: Fields) -> int:
    """Of the context before it was stretched: also at the top of the file, in Phi's."""
    name = "original_max_position_embeddings"
    return section.integer(name, fields.integer(name, fields.integer("max_position_embeddings")))
