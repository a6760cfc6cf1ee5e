import hashlib
import hmac

import pytest

from hex_llm.config import Config
from hex_llm.errors import ConfigError, Unauthorized
from hex_llm.server.keys import Keys


def write(tmp_path, content: str | bytes) -> Config:
    path = tmp_path / "keys"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Config(api_key_file=str(path))


def key_id(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_without_keys_everybody_is_served():
    keys = Keys.load(Config(), {})
    assert len(keys) == 0
    assert keys.check(None) is None
    assert keys.check("Bearer anything") is None


def test_keys_come_from_the_file_and_the_environment(tmp_path):
    config = write(tmp_path, "# ours\n\n  sk-one  \r\nsk#two\n")
    keys = Keys.load(config, {"HEXLLM_API_KEYS": "sk-three, sk-one"})
    assert len(keys) == 3
    for key in ("sk-one", "sk#two", "sk-three"):
        assert keys.check(f"Bearer {key}") == key_id(key)
    assert keys.check("bearer  sk-one ") == key_id("sk-one")


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer sk-on", "Bearer sk-onee", "Bearer SK-ONE", "sk-one",
     "Basic sk-one", "Bearer sk-one, Bearer sk-one", "Bearer sk-one x", "Bearer \xe9\xff", "\xff\xfe",
     "Bearer \ud800", "Bearer # ours"],
)  # fmt: skip
def test_nobody_else_is_served(tmp_path, authorization):
    keys = Keys.load(write(tmp_path, "# ours\nsk-one\n"), {})
    with pytest.raises(Unauthorized) as caught:
        keys.check(authorization)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert "sk-on" not in str(caught.value)
    assert "wrong" not in str(caught.value)


def test_every_key_is_compared_whatever_the_first_ones_give(monkeypatch):
    keys = Keys.load(Config(), {"HEXLLM_API_KEYS": "a,b,c"})
    compared = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(len(second))
        return first == second

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys.check("Bearer a")
    assert compared == [32, 32, 32]


def test_keys_are_not_kept_as_they_are():
    keys = Keys.load(Config(), {"HEXLLM_API_KEYS": "sk-secret"})
    keys.__dict__.pop("_listed")  # the environment holds it anyway
    assert "sk-secret" not in str(vars(keys))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no keys"),
        ("# only\n\n", "has no keys"),
        ("sk-good\nsk-secret two\n", "line 2"),
        ("\n\nsk-secret\u00e9\n", "line 3"),
        (b"sk-good\nsk-secret\xff\n", "line 2"),
        ("x" * 1025, "line 1"),
        ("sk-secret\x00", "line 1"),
    ],
)
def test_a_bad_file_is_named_with_its_line_and_never_its_keys(tmp_path, content, words):
    with pytest.raises(ConfigError) as caught:
        Keys.load(write(tmp_path, content), {})
    assert words in str(caught.value)
    assert str(tmp_path / "keys") in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Keys.load(Config(api_key_file=str(tmp_path / "none")), {})
    with pytest.raises(ConfigError, match="Is a directory"):
        Keys.load(Config(api_key_file=str(tmp_path)), {})


@pytest.mark.parametrize("listed", ["", "  ", ",", "sk-secret,", "sk-secret two", "sk-secret\u00e9"])
def test_a_bad_variable_is_refused(listed):
    with pytest.raises(ConfigError) as caught:
        Keys.load(Config(), {"HEXLLM_API_KEYS": listed})
    assert "HEXLLM_API_KEYS" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_keys_are_read_again(tmp_path, caplog):
    config = write(tmp_path, "sk-one\n")
    keys = Keys.load(config, {"HEXLLM_API_KEYS": "sk-always"})
    write(tmp_path, "sk-two\n")
    keys.reload()
    assert keys.check("Bearer sk-two") == key_id("sk-two")
    assert keys.check("Bearer sk-always") == key_id("sk-always")
    with pytest.raises(Unauthorized):
        keys.check("Bearer sk-one")

    for bad in ("", "sk-secret two"):
        write(tmp_path, bad)
        keys.reload()
        assert "stay as they were" in caplog.text
        assert "secret" not in caplog.text
        assert keys.check("Bearer sk-two") == key_id("sk-two")


@pytest.mark.parametrize("name", ["HEX_LLM_API_KEYS", "HEX_LLM_API_KEY", "HEXLLM_API_KEY"])
def test_keys_under_a_name_that_is_almost_right_do_not_leave_the_server_open(name):
    with pytest.raises(ConfigError, match=f"{name} is set, but it is HEXLLM_API_KEYS"):
        Keys.load(Config(), {name: "sk-one"})


def test_a_server_with_keys_may_also_be_a_client_with_one():
    assert len(Keys.load(Config(), {"HEXLLM_API_KEYS": "sk-one", "HEXLLM_API_KEY": "sk-two"})) == 1
