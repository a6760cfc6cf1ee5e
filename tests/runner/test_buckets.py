import itertools

import pytest

from hex_llm.runner.buckets import SEPARATE, TOGETHER, Bucket, Buckets
from hex_llm.runner.programs import Admit, Forward, ScorePrompt, Seat, all_programs, choosing_programs


def ladders():
    for decode_padding, max_decodes, mixed_padding, max_tokens, growth in itertools.product(
        (1, 8, 12), (1, 8, 100, 256), (16, 512), (16, 600, 2048), (2, 8)
    ):
        yield Buckets(decode_padding, max_decodes, mixed_padding, max_tokens, max_mixed_seqs=8, growth=growth)


@pytest.mark.parametrize("buckets", list(ladders()))
def test_padding_never_leaves_the_compiled_set(buckets):
    compiled = set(all_programs(buckets))
    for tokens in range(1, buckets.max_mixed_tokens + 1):
        bucket = buckets.choose(tokens, decode=False)
        assert bucket.tokens >= tokens
        assert {Forward(bucket), ScorePrompt(bucket.tokens)} <= compiled
    for tokens in range(1, buckets.max_decodes + 1):
        bucket = buckets.choose(tokens, decode=True)
        assert Forward(bucket) in compiled
        assert bucket.seqs == bucket.tokens >= tokens
    assert {Forward(bucket) for bucket in buckets.largest()} <= compiled


@pytest.mark.parametrize("variants", [SEPARATE, TOGETHER])
def test_every_wish_has_a_compiled_variant_for_every_number_of_sequences(variants):
    buckets = Buckets(8, 256, 512, 8192, 24, variants=variants)
    compiled = set(all_programs(buckets))
    for wanted, bucket in itertools.product(SEPARATE, buckets):
        assert buckets.variant(wanted) >= wanted
        assert compiled.issuperset(choosing_programs(bucket.rows, variants))
    assert {Admit(), Seat()} <= compiled


def test_the_default_flags_make_few_graphs():
    buckets = Buckets(8, 256, 512, 8192, 8)
    assert [b.tokens for b in buckets if b.decode] == [8, 16, 32, 64, 128, 256]
    assert [b.tokens for b in buckets if not b.decode] == [512, 1024, 2048, 4096, 8192]


def test_a_decode_alone_can_have_a_bucket_of_its_own():
    buckets = Buckets(8, 32, 512, 512, 8, single=True)
    assert [b.tokens for b in buckets if b.decode] == [1, 8, 16, 32]
    assert [buckets.choose(tokens, decode=True).tokens for tokens in (1, 2, 8)] == [1, 8, 8]
    assert buckets.choose(1, decode=False).tokens == 512


def test_a_device_that_compiles_slowly_gets_fewer_still():
    buckets = Buckets(8, 256, 512, 2048, 8, growth=8)
    assert list(buckets) == [
        Bucket(8, 8, 8, True), Bucket(64, 64, 64, True), Bucket(256, 256, 256, True),
        Bucket(512, 8, 8, False), Bucket(2048, 8, 8, False),
    ]  # fmt: skip


def test_fewer_numbers_of_rows_than_of_sequences_hold_them_all():
    for decode_padding, max_decodes, mixed_seqs in itertools.product((1, 8, 12), (1, 8, 100, 256), (1, 8, 100, 256)):
        buckets = list(Buckets(decode_padding, max_decodes, 128, 512, mixed_seqs, row_growth=8, single=True))
        assert all(bucket.rows >= bucket.seqs for bucket in buckets)
        assert len({bucket.rows for bucket in buckets}) <= 6
    buckets = Buckets(8, 128, 128, 512, 128, row_growth=8, single=True)
    assert {bucket.tokens: bucket.rows for bucket in buckets if bucket.decode} == {
        1: 8, 8: 8, 16: 64, 32: 64, 64: 64, 128: 128,
    }  # fmt: skip
    # With many, spare ones are dear.
    buckets = Buckets(64, 512, 128, 512, 512, row_growth=8)
    assert all(bucket.rows == bucket.seqs for bucket in buckets if bucket.decode)
