import pytest

from hex_llm.errors import ConfigError
from hex_llm.source import locate


def test_a_folder_is_itself(tmp_path):
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "gs://bucket/model", "no such folder", "a\0b"])
def test_what_is_no_folder_is_refused_by_name(model):
    with pytest.raises(ConfigError, match="this version reads models from folders only") as caught:
        locate(model)
    assert model in str(caught.value)


def test_a_file_an_empty_name_and_an_endless_one_are_refused(tmp_path):
    (tmp_path / "weights").touch()
    for model, words in ((str(tmp_path / "weights"), "is a file"), ("", "is empty"), ("x" * 5000, "too long")):
        with pytest.raises(ConfigError, match=words):
            locate(model)
