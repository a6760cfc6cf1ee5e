import pytest

from hex_llm.download.allowed import Allowed
from hex_llm.download.reference import InBucket, OnHub
from hex_llm.errors import ConfigError

ALLOWED = Allowed(["gs://bucket/adapters/", "gs://whole-bucket", "owner/", "other/one"])


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("gs://bucket/adapters/a", InBucket("bucket", "adapters/a")),
        ("gs://bucket/adapters/a/b=1/", InBucket("bucket", "adapters/a/b=1")),
        ("gs://bucket/adapters", InBucket("bucket", "adapters")),
        ("gs://whole-bucket/x", InBucket("whole-bucket", "x")),
        ("owner/any", OnHub("owner/any")),
        ("owner/any@v2", OnHub("owner/any", "v2")),
        ("other/one", OnHub("other/one")),
    ],
)
def test_what_lies_under_a_prefix_is_allowed(text, reference):
    assert ALLOWED.find(text) == reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gs://bucket/adapters-of-others/a",
        "gs://bucket/other",
        "gs://bucket",
        "gs://bucket2/adapters/a",
        "gs://bucket/adapters/../other",
        "gs://bucket/adapters/%2e%2e/other",
        "gs://bucket/adapters//a",
        "gs://bucket/adapters/a b",
        "gs://bucket/adapters/a\n",
        "gs://BUCKET/adapters/a",
        "owner",
        "owner2/any",
        "other/two",
        "/etc",
        "./adapters",
        "file:///etc/passwd",
        "https://host/adapter",
    ],
)
def test_all_else_is_not(text):
    assert ALLOWED.find(text) is None


def test_without_prefixes_nothing_is():
    assert Allowed([]).find("gs://bucket/adapters/a") is None
    assert Allowed([]).find("owner/any") is None


@pytest.mark.parametrize("prefix", ["", "/", "owner", "owner/name/", "owner/name@v1", "/folder", "https://host/"])
def test_what_is_no_prefix_is_refused(prefix):
    with pytest.raises(ConfigError, match="is no prefix of sources"):
        Allowed([prefix])
