import pytest

from hex_llm.catalog.index import ENTRIES, find
from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.source import EMBEDDED_MODEL, model_folder, model_source, tokenizer_folder
from hex_llm.text.tokenizer import Tokenizer

NAME = "meta-llama/Llama-3.1-8B"


def test_a_folder_is_itself(tmp_path):
    assert model_source(Config(model=str(tmp_path))) == tmp_path


@pytest.mark.parametrize("model", ["no such folder", "nowhere/to/be/found", "./nowhere", "a\0b"])
def test_what_can_be_no_model_is_refused_by_name(model):
    with pytest.raises(ConfigError, match="is neither a folder on this machine, nor can it be a model") as caught:
        model_source(Config(model=model))
    assert f"--model={model}" in str(caught.value)


def test_a_file_and_an_endless_name_are_refused(tmp_path):
    (tmp_path / "weights").touch()
    for model, words in ((str(tmp_path / "weights"), "is a file"), ("x" * 5000, "too long")):
        with pytest.raises(ConfigError, match=words):
            model_source(Config(model=model))


def test_a_tokenizer_that_can_be_none_is_refused_under_its_own_flag():
    with pytest.raises(ConfigError, match=r"--tokenizer=\./nowhere is neither a folder"):
        tokenizer_folder(Config(tokenizer="./nowhere"))


def test_a_revision_is_for_a_model_of_the_hub(tmp_path):
    with pytest.raises(ConfigError, match=r"--revision=v1 is for a model of the Hugging Face Hub; .* is a folder"):
        model_source(Config(model=str(tmp_path), revision="v1"))
    with pytest.raises(ConfigError, match=r"--revision=v1 is for a model of the .* Hub; gs://b.* is not there"):
        model_source(Config(model="gs://bucket/model", revision="v1"))
    with pytest.raises(ConfigError, match="--revision=v1 and --model=a/b@v2 name two revisions"):
        model_source(Config(model="a/b@v2", revision="v1"))


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
