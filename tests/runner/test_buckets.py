import itertools

import pytest

from hex_llm.runner.buckets import COARSE, FINE, FUSED, Buckets, Variant


def ladders():
    for decode_padding, max_decodes, mixed_padding, max_tokens, growth in itertools.product(
        (1, 8, 12), (1, 8, 100, 256), (16, 512), (16, 600, 2048), (FINE, FUSED, COARSE)
    ):
        yield Buckets(decode_padding, max_decodes, mixed_padding, max_tokens, max_mixed_seqs=8, growth=growth)


@pytest.mark.parametrize("buckets", list(ladders()))
def test_padding_never_leaves_the_compiled_set(buckets):
    compiled = set(buckets)
    for variant, tokens in itertools.product(FINE, range(1, buckets.max_mixed_tokens + 1)):
        bucket = buckets.choose(tokens, decode=False, variant=variant)
        assert bucket in compiled
        assert bucket.tokens >= tokens
        assert bucket.variant >= variant
    for variant, tokens in itertools.product((Variant.PLAIN, Variant.FULL), range(1, buckets.max_decodes + 1)):
        bucket = buckets.choose(tokens, decode=True, variant=variant)
        assert bucket in compiled
        assert bucket.seqs == bucket.tokens >= tokens
        assert bucket.variant >= variant
    assert compiled.issuperset(buckets.largest())


def test_the_default_flags_make_few_graphs():
    buckets = Buckets(8, 256, 512, 8192, 8, FINE)
    assert len(list(buckets)) == 20
    assert [b.tokens for b in buckets if b.decode and b.variant == Variant.PLAIN] == [8, 16, 32, 64, 128, 256]
    assert [b.tokens for b in buckets if not b.decode and b.variant == Variant.PLAIN] == [512, 1024, 2048, 4096, 8192]


def test_a_device_that_compiles_slowly_gets_fewer_still():
    buckets = Buckets(8, 256, 512, 2048, 8, COARSE)
    assert [(b.tokens, b.decode) for b in buckets] == [(8, True), (64, True), (256, True), (512, False), (2048, False)]
