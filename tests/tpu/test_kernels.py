"""The kernels for TPUs, compiled at the sizes that models have on a device."""

import pytest

LLAMA_8B_ON_4 = {"heads": 8, "kv_heads": 2}
LLAMA_70B_ON_16 = {"heads": 4, "kv_heads": 1}
LLAMA_2_7B = {"heads": 32, "kv_heads": 32}
GEMMA_2_9B = {"heads": 16, "kv_heads": 8, "head_dim": 256, "window": [4096], "soft_cap": 50.0, "max_model_len": 8192}
GPT_OSS = {"heads": 64, "kv_heads": 8, "head_dim": 64, "window": [128], "sinks": True}
LARGEST_GROUP = {"heads": 32, "kv_heads": 1, "head_dim": 256, "dtype": "float32", "max_model_len": 4096}
FP8 = {"pages_dtype": "float8_e4m3fn"}
LLAMA_4_ON_8 = {"heads": 5, "kv_heads": 1, "window": [8192, True]}


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        ("v5e", LLAMA_8B_ON_4 | {"decode": True}),
        ("v5e", LLAMA_8B_ON_4),
        ("v5e", LLAMA_70B_ON_16 | {"decode": True, "page_size": 8}),
        ("v6e", LLAMA_70B_ON_16 | {"page_size": 8192}),
        ("v6e", GPT_OSS | {"decode": True}),
        ("v5p", GPT_OSS),
        ("v4", LLAMA_2_7B | {"decode": True, "max_model_len": 4096}),
        ("v4", GEMMA_2_9B),
        ("v4", LARGEST_GROUP),
        ("tpu7x", LLAMA_4_ON_8 | {"dtype": "float32"}),
        ("v5e", LLAMA_8B_ON_4 | FP8 | {"decode": True}),
        ("v5e", LLAMA_8B_ON_4 | FP8 | {"page_size": 8}),
        ("v4", GEMMA_2_9B | FP8),
        ("v6e", GPT_OSS | FP8 | {"decode": True}),
        ("tpu7x", LLAMA_70B_ON_16 | FP8),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_compiles_and_works_on_the_pages_where_they_are(compiler, topology, sizes):
    tokens = 256 if sizes.get("decode") else 2048
    compiled = compiler.compile("tests.tpu.kernels.attention", topology, tokens=tokens, **sizes)
    kernels = {"write", "decode"} | ({"prefill"} if tokens > 256 else set())
    assert {name.split(".")[0] for name in compiled.kernels} == {f"paged_attention_{name}" for name in kernels}
    wide = max(sizes.get("head_dim", 128), 128) / sizes.get("head_dim", 128)  # rows are whole tiles
    assert compiled.alias_bytes == wide * 2**30
    assert compiled.temp_bytes < 2**27
