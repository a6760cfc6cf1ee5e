import pytest

from hex_llm.download.reference import InBucket, OnHub, parse_reference, with_revision
from hex_llm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("meta-llama/Llama-3.1-8B", OnHub("meta-llama/Llama-3.1-8B")),
        ("gpt2", OnHub("gpt2")),
        ("a/b@v1.0", OnHub("a/b", "v1.0")),
        ("a/b@refs/pr/3", OnHub("a/b", "refs/pr/3")),
        ("gs://bucket/a/b", InBucket("bucket", "a/b")),
        ("gs://bucket/a b/c=1/", InBucket("bucket", "a b/c=1")),
        ("gs://my.bucket", InBucket("my.bucket")),
    ],
)
def test_names_are_what_they_say(text, reference):
    assert parse_reference(text) == reference
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    ["", "a/b/c", "/a/b", "./a", "../b", "a/..", "a b", "a/b@", "a/b@../x", "a/b@x y", "a--b/c", "https://x/y", "a\0b"],
)
def test_what_is_no_name_is_none(text):
    assert parse_reference(text) is None


@pytest.mark.parametrize("text", ["gs://", "gs:///path", "gs://UPPER/x", "gs://b", "gs://b..", "gs://buc ket/x"])
def test_an_address_without_a_bucket_is_refused(text):
    with pytest.raises(ConfigError, match="names no bucket"):
        parse_reference(text)


@pytest.mark.parametrize("path", ["a//b", "../a", "a/./b", "a\nb"])
def test_a_path_that_leads_elsewhere_is_refused(path):
    with pytest.raises(ConfigError, match="in its path"):
        parse_reference(f"gs://bucket/{path}")


def test_a_revision_is_given_once():
    assert with_revision(OnHub("a/b"), "v1") == with_revision(OnHub("a/b", "v1"), "v1") == OnHub("a/b", "v1")
    with pytest.raises(ConfigError, match="--revision=v2 and --model=a/b@v1 name two revisions"):
        with_revision(OnHub("a/b", "v1"), "v2")
    with pytest.raises(ConfigError, match="no branch, tag or commit"):
        with_revision(OnHub("a/b"), "../x")
