"""Phi-3, Phi-4."""

from typing import Any

from hex_llm.catalog.entry import entries, sizes
from hex_llm.catalog.machines import v5e

_PHI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_PHI_3 = _PHI | {
    "vocab_size": 32064,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "sliding_window": 2047,
}
_MINI = _PHI_3 | sizes(hidden=3072, mlp=8192, layers=32, heads=32, kv_heads=32)
_14B = sizes(hidden=5120, mlp=17920, layers=40, heads=40, kv_heads=10)
_MEDIUM = _PHI_3 | _14B

# Every pair of a head's dimensions is slowed by a factor of its own: by one list up to the original context, by the
# other beyond it.
# fmt: off
_MINI_SHORT = [
    1.1, 1.1, 1.1, 1.3, 1.35, 1.35, 1.4, 1.55, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0,
    2.0, 2.0, 2.0, 2.0, 2.05, 2.05, 2.05, 2.05, 2.05, 2.05, 2.1, 2.1, 2.15, 2.25, 2.25, 2.25, 2.25, 2.25, 2.4,
    2.45, 2.5, 2.7, 2.7, 2.75, 2.8, 2.9, 3.05,
]
_MINI_LONG = [
    1.07, 1.12, 1.15, 1.42, 1.57, 1.8, 2.13, 2.13, 3.01, 5.91, 6.95, 9.070001, 9.93, 10.71, 11.13, 14.61,
    15.409999, 19.809999, 37.279999, 38.279999, 38.599998, 40.120003, 46.200005, 50.940006, 53.660007,
    54.937389, 56.897388, 57.287388, 59.987385, 60.867386, 60.887386, 61.717392, 62.917393, 62.957394,
    63.417393, 63.817394, 63.837395, 63.897396, 63.937397, 64.067398, 64.114349, 64.124352, 64.15435, 64.194351,
    64.244354, 64.574356, 64.690002, 64.760002,
]
_MEDIUM_SHORT = [
    1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.01, 1.02, 1.02, 1.04, 1.04, 1.07, 1.07, 1.1, 1.3, 1.3, 1.5, 1.57, 1.9, 2.31,
    2.76, 3.39, 3.94, 4.01, 4.29, 4.35, 5.35, 6.66, 7.03, 7.52, 8.01, 8.25, 8.28, 9.63, 9.9, 10.59, 11.05,
    11.79, 12.19, 12.89, 13.13, 13.17, 13.21, 13.48, 13.54, 13.78, 13.93, 14.43, 14.76, 15.15, 15.42, 15.54,
    15.66, 15.75, 15.76, 15.8, 16.06, 16.08, 16.12, 16.12, 16.19, 16.32, 16.54, 16.8,
]
_MEDIUM_LONG = [
    1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.25, 1.25, 1.5, 2.0, 2.75, 5.75, 5.75,
    6.5, 9.25, 11.0, 13.25, 19.25, 19.75, 19.75, 21.25, 21.5, 26.5, 30.0, 33.75, 35.25, 38.5, 42.0, 42.25, 46.0,
    47.0, 50.0, 50.5, 51.0, 52.0, 52.75, 53.75, 54.75, 57.0, 57.25, 58.5, 59.25, 59.5, 62.0, 62.5, 62.75, 63.25,
    63.25, 63.25, 63.75, 64.0, 64.0, 64.25, 64.5, 64.5, 65.0, 65.0,
]
# fmt: on


def _stretched(short: list[float], long: list[float], window: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": 131072,
        "sliding_window": window,
        "rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long},
    }


def _phi_4(context: int, theta: float) -> dict[str, Any]:
    return (
        _PHI
        | _14B
        | {
            "vocab_size": 100352,
            "rope_theta": theta,
            "max_position_embeddings": context,
            "original_max_position_embeddings": context,
            "sliding_window": None,
        }
    )


PHI = (
    *entries(
        "microsoft/Phi-3-mini-4k-instruct",
        parameters=3_821_079_552,
        config=_MINI,
        recommended=v5e(1),
    ),
    *entries(
        "microsoft/Phi-3-mini-128k-instruct",
        parameters=3_821_079_552,
        config=_MINI | _stretched(_MINI_SHORT, _MINI_LONG, window=262144),
        recommended=v5e(4, length=131072),
    ),
    *entries(
        "microsoft/Phi-3-medium-4k-instruct",
        parameters=13_960_238_080,
        config=_MEDIUM,
        recommended=v5e(4),
    ),
    *entries(
        "microsoft/Phi-3-medium-128k-instruct",
        parameters=13_960_238_080,
        config=_MEDIUM | _stretched(_MEDIUM_SHORT, _MEDIUM_LONG, window=131072),
        recommended=v5e(4, length=131072),
    ),
    *entries(
        "microsoft/phi-4",
        parameters=14_659_507_200,
        config=_phi_4(16384, 250000.0),
        recommended=v5e(4, memory=0.85, length=16384),
    ),
    *entries(
        "microsoft/Phi-4-reasoning",
        "microsoft/Phi-4-reasoning-plus",
        parameters=14_659_507_200,
        config=_phi_4(32768, 500000.0),
        recommended=v5e(4, memory=0.85, length=32768),
    ),
)
