import warnings

import jax
import pytest

from hex_llm.errors import ConfigError
from hex_llm.runner.cache_folder import use_cache


@pytest.fixture(autouse=True)
def as_before():
    names = [name for name in jax.config.values if "compilation_cache" in name or "persistent_cache" in name]
    before = {name: jax.config.values[name] for name in names}
    with warnings.catch_warnings():
        yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_what_is_compiled_is_kept_in_the_folder_or_nowhere(tmp_path):
    use_cache(str(tmp_path / "new"), tmp_path / "new")
    jax.jit(lambda x: x * 3 + 1)(2.0)
    assert [*(tmp_path / "new").glob("*-cache")]
    use_cache(None, None)
    assert not jax.config.values["jax_enable_compilation_cache"]


def test_an_address_is_left_to_jax(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use_cache("gs://bucket/folder", None)
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/folder"
    assert not [*tmp_path.iterdir()]


def test_an_empty_file_is_written_anew(tmp_path):
    (tmp_path / "jit_f-1-cache").write_bytes(b"")
    (tmp_path / "jit_g-1-cache").write_bytes(b"full")
    use_cache(str(tmp_path), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["jit_g-1-cache"]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:20], lambda data: b"\0" * len(data)])
def test_a_damaged_file_is_told_of_and_written_anew(tmp_path, caplog, damage):
    def compiled() -> float:
        use_cache(str(tmp_path), tmp_path)
        jax.clear_caches()
        return float(jax.jit(lambda x: x * 5 + 2)(4.0))

    assert compiled() == 22
    whole = {path: path.read_bytes() for path in tmp_path.glob("*-cache")}
    for path, data in whole.items():
        path.write_bytes(damage(data))
    other = tmp_path / "jit_other-1-cache"
    other.write_bytes(b"another program's")
    assert compiled() == 22
    assert caplog.text.count("is damaged; it is compiled again") == len(whole) == 1
    caplog.clear()
    assert compiled() == 22
    assert not caplog.records
    assert {path for path in tmp_path.glob("*-cache") if path != other} == {*whole}
    assert other.exists()


def test_other_warnings_are_shown_as_before(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    for _ in range(2):
        use_cache(str(tmp_path), tmp_path)
    warnings.warn("of another kind", stacklevel=1)
    assert shown == ["of another kind"]


def test_what_is_no_folder_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(ConfigError, match=f"--compilation_cache_dir={path} is not a folder"):
            use_cache(str(path), path)


def test_a_folder_that_can_only_be_read_is_told_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    use_cache(str(tmp_path), tmp_path)
    assert caplog.text.count("cannot be written to") == 1
    with warnings.catch_warnings(record=True) as told:
        warnings.warn("Error writing persistent compilation cache entry for 'jit_f': OSError", stacklevel=1)
    assert not told
