"""--prefix_cache_isolation: whose prefixes a request may find."""

from types import SimpleNamespace

import pytest

from hex_llm.config import Config
from hex_llm.errors import RequestError
from hex_llm.server.state import Server


def salt(isolation: str, num_keys: int, key_id: str | None, cache_salt: str | None = None) -> str:
    server = SimpleNamespace(config=Config(prefix_cache_isolation=isolation), keys=["key"] * num_keys)
    return Server.salt(server, key_id, cache_salt)


@pytest.mark.parametrize(
    ("isolation", "num_keys", "apart"),
    [("auto", 2, True), ("auto", 1, False), ("key", 1, True), ("key", 2, True), ("none", 2, False)],
)
def test_keys_are_kept_apart_where_that_is_wanted(isolation, num_keys, apart):
    assert (salt(isolation, num_keys, "one") != salt(isolation, num_keys, "two")) == apart
    assert salt(isolation, num_keys, "one") == salt(isolation, num_keys, "one")


@pytest.mark.parametrize("isolation", ["auto", "none", "key", "salt"])
def test_salts_are_kept_apart_in_any_case(isolation):
    found = {salt(isolation, 2, key, text) for key in ("one", "two") for text in ("a", "b", "one\na")}
    assert len(found) == (3 if isolation in ("none", "salt") else 6)


def test_where_salts_are_wanted_a_request_without_one_is_refused():
    with pytest.raises(RequestError) as caught:
        salt("salt", 1, "one")
    assert caught.value.param == "cache_salt"
