import pytest

from hex_llm.catalog.index import ENTRIES, find
from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.source import EMBEDDED_MODEL, locate, model_folder, model_source, tokenizer_folder
from hex_llm.text.tokenizer import Tokenizer

NAME = "meta-llama/Llama-3.1-8B"


def test_a_folder_is_itself(tmp_path):
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", [NAME, "gs://bucket/model", "no such folder", "a\0b"])
def test_what_is_no_folder_is_refused_by_name(model):
    with pytest.raises(ConfigError, match="this version reads models from folders only") as caught:
        locate(model)
    assert model in str(caught.value)


def test_a_file_an_empty_name_and_an_endless_one_are_refused(tmp_path):
    (tmp_path / "weights").touch()
    for model, words in ((str(tmp_path / "weights"), "is a file"), ("", "is empty"), ("x" * 5000, "too long")):
        with pytest.raises(ConfigError, match=words):
            locate(model)


def test_a_tokenizer_that_is_no_folder_is_refused_under_its_own_flag():
    with pytest.raises(ConfigError, match="--tokenizer=nowhere is not a folder"):
        tokenizer_folder(Config(tokenizer="nowhere"))


def test_without_a_model_all_is_the_embedded_ones():
    config = Config()
    assert model_source(config) == model_folder(config) == tokenizer_folder(config) == EMBEDDED_MODEL


def test_a_folder_is_taken_before_the_catalog(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    config = Config(model=NAME, load_format="dummy")
    assert str(model_source(config)) == str(model_folder(config)) == NAME


def test_a_catalogued_name_with_dummy_weights_needs_no_folder_and_has_the_embedded_tokenizer(tmp_path):
    config = Config(model=NAME.lower(), load_format="dummy")
    assert model_source(config) is find(NAME)
    assert tokenizer_folder(config) == model_folder(config) == EMBEDDED_MODEL
    given = Config(model=NAME, load_format="dummy", tokenizer=str(tmp_path))
    assert tokenizer_folder(given) == model_folder(given) == tmp_path


def test_the_embedded_tokenizer_fits_the_vocabulary_of_every_catalogued_model():
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    for entry in ENTRIES:
        tokenizer.check_embedding(entry.text["vocab_size"])


def test_a_catalogued_name_without_dummy_weights_is_refused_with_a_hint():
    with pytest.raises(ConfigError, match="With --load_format=dummy it can be run by this name, on random weights"):
        model_source(Config(model=NAME))
    with pytest.raises(ConfigError) as caught:
        model_source(Config(model="nobody/nothing"))
    assert "dummy" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("meta-llama/Llama-3.1-9B", "did you mean meta-llama/Llama-3.1-8B or "),
        ("xyzzy", "`hex-llm models` lists it."),
        ("y" * 5000, "`hex-llm models` lists it."),
    ],
)
def test_an_unknown_name_with_dummy_weights_is_refused_with_names_near_it(name, hint):
    with pytest.raises(ConfigError) as caught:
        model_source(Config(model=name, load_format="dummy"))
    message = str(caught.value)
    assert message.startswith(
        f"--model={name[:200]} is neither a folder on this machine nor a model of the catalog; {hint}"
    )
    assert "\n" not in message
