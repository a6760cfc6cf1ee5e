"""What is downloaded, what is not, and what is refused."""

import json

import pytest

from hex_llm.download.cloud_storage import BucketSource
from hex_llm.download.fetch import fetch
from hex_llm.download.hub import HubSettings, HubSource
from hex_llm.download.reference import InBucket, OnHub
from hex_llm.download.wanted import MODEL, TEXT
from hex_llm.errors import CheckpointError, DownloadError, NoSpace
from tests.download.servers import running_emulator
from tests.download.stand_in import COMMIT, TOKEN

WEIGHTS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
INDEX = {"model.safetensors.index.json"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def same(folder, model):
    return all((folder / name).read_bytes() == (model / name).read_bytes() for name in names(folder))


def test_a_model_comes_whole_and_nothing_else_does(source, model, stand_in):
    shares = []
    folder = fetch(source, MODEL, timeout_s=5, report=shares.append)
    assert names(folder) == SMALL | INDEX | WEIGHTS
    assert same(folder, model)
    assert shares[-1] == 1
    assert not [path for path in source.store.folder.rglob("*") if ".part" in path.name]
    assert not any("unwanted" in path.read_text(errors="ignore") for path in folder.iterdir())


def test_large_files_come_in_ranges(source, model, stand_in):
    fetch(source, MODEL, timeout_s=5)
    name = min(WEIGHTS)
    asked = [each["range"] for each in stand_in.asked_for(name) if str(source).split("/")[-1] in each["path"]]
    assert len(set(asked)) == -(-(model / name).stat().st_size // 65536) > 1


def test_what_is_there_is_not_downloaded_again(source, stand_in):
    first = fetch(source, TEXT, timeout_s=5)
    assert names(first) == SMALL
    assert fetch(source, MODEL, timeout_s=5) == first
    before = len(stand_in.log())
    assert fetch(source, MODEL, timeout_s=5) == first
    pages = 4 if isinstance(source, BucketSource) else 1
    assert len(stand_in.log()) - before == pages


def test_a_server_without_ranges_is_understood(source, model, stand_in):
    stand_in.set_faults({"match": "safetensors", "no_ranges": True, "times": 1000})
    assert same(fetch(source, MODEL, timeout_s=5), model)


def test_too_small_a_disk_is_known_before_the_first_byte(source, stand_in, no_room):
    no_room(64 * 2**20 + 100_000)
    with pytest.raises(NoSpace, match=r"needs 0\.4\d MB more on the disk of .*67\.21 MB are free.*--download_dir"):
        fetch(source, MODEL, timeout_s=5)
    asked = [each["path"] for each in stand_in.log() if str(source).split("/")[-1] in each["path"]]
    assert any("config.json" in path for path in asked)
    assert not any("-of-00002" in path for path in asked)


def test_files_of_folders_below_are_not_the_models(source, stand_in, model):
    own = str(source).split("/")[-1]
    (folder,) = (path for path in stand_in.root.glob(f"*/*/{own}") if path.is_dir())
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("another")
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_text("another")
    assert names(fetch(source, MODEL, timeout_s=5)) == SMALL | INDEX | WEIGHTS


def test_names_that_lead_elsewhere_are_no_files(stand_in, tmp_path):
    name = "tokenizer_/../../../x.json"
    siblings = [{"rfilename": each, "size": 2, "blobId": "0" * 40} for each in (name, "/etc/tokenizer.json", "..")]
    listing = json.dumps({"sha": COMMIT, "siblings": siblings})
    stand_in.set_faults({"match": f"/api/models/test/{tmp_path.name}", "body": listing})
    source = HubSource(OnHub(f"test/{tmp_path.name}"), HubSettings(stand_in.url, tmp_path / "cache", None, False))
    assert names(fetch(source, TEXT, timeout_s=5)) == set()
    assert not stand_in.asked_for(f"{tmp_path.name}/resolve")


def test_what_is_there_is_only_read(source, stand_in):
    """A cache may be on a disk that cannot be written to."""
    folder = fetch(source, MODEL, timeout_s=5)
    before = written(source.store.folder)
    assert fetch(source, MODEL, timeout_s=5) == folder
    assert written(source.store.folder) == before


def written(folder):
    return {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


def test_a_cache_that_cannot_be_written_to_is_told(source, stand_in):
    source.store.folder.parent.mkdir(parents=True)
    source.store.folder.write_text("a file")
    with pytest.raises(DownloadError, match=rf"{source.store.folder}.* cannot be written to"):
        fetch(source, TEXT, timeout_s=5)


def test_no_model_is_said_so(stand_in, tmp_path):
    def refusal(error, *files):
        folder = stand_in.hub(f"test/{tmp_path.name}-{len(files)}-{files[-1]}")
        for name in files:
            (folder / name).write_text("{}")
        source = HubSource(OnHub(f"test/{folder.name}"), HubSettings(stand_in.url, tmp_path, None, False))
        with pytest.raises(error) as caught:
            fetch(source, MODEL, timeout_s=5)
        return str(caught.value)

    assert "has no config.json." in refusal(CheckpointError, "model.safetensors")
    assert "holds no *.safetensors file; it has a.bin, a format that is not read." in refusal(
        CheckpointError, "config.json", "a.bin"
    )
    assert "weight_map is missing" in refusal(CheckpointError, "config.json", "model.safetensors.index.json")


def test_an_index_that_names_other_files_is_refused(stand_in, tmp_path):
    folder = stand_in.hub(f"test/{tmp_path.name}")
    source = HubSource(OnHub(f"test/{folder.name}"), HubSettings(stand_in.url, tmp_path, None, False))
    (folder / "config.json").write_text("{}")
    for file, words in (
        ("../model.safetensors", "not a safetensors file of this folder"),
        ("pytorch_model.bin", "not a safetensors file of this folder"),
        ("model-1.safetensors", "has no model-1.safetensors, and its model.safetensors.index.json names it"),
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
        with pytest.raises(CheckpointError, match=words):
            fetch(source, MODEL, timeout_s=5)


def test_an_object_that_changes_is_another_version(stand_in, model, tmp_path):
    folder = stand_in.bucket(f"models/{tmp_path.name}")
    (folder / "config.json").write_text("1")
    source = BucketSource(InBucket("models", tmp_path.name), tmp_path)
    first = fetch(source, TEXT, timeout_s=5)
    (folder / "config.json").write_text("2")
    second = fetch(source, TEXT, timeout_s=5)
    assert first != second
    assert [(each / "config.json").read_text() for each in (first, second)] == ["1", "2"]


def test_a_real_emulator_of_cloud_storage(model, tmp_path, monkeypatch):
    with running_emulator("bucket", model, "some/path/") as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        folder = fetch(BucketSource(InBucket("bucket", "some/path"), tmp_path), MODEL, timeout_s=5)
        with pytest.raises(DownloadError, match="gs://bucket/some/where has no files"):
            fetch(BucketSource(InBucket("bucket", "some/where"), tmp_path), MODEL, timeout_s=5)
        with pytest.raises(DownloadError, match="answers 404") as caught:
            fetch(BucketSource(InBucket("no-such-bucket"), tmp_path), MODEL, timeout_s=5)
    assert caught.value.status == 404
    assert names(folder) == SMALL | INDEX | WEIGHTS
    assert same(folder, model)


def test_an_address_may_have_a_path(stand_in, tmp_path):
    folder = stand_in.hub(f"test/private-{tmp_path.name}")
    (folder / "tokenizer.json").write_text("x" * 200_000)
    mirror = HubSettings(f"{stand_in.url}/mirror", tmp_path, TOKEN, False)
    assert names(fetch(HubSource(OnHub(f"test/{folder.name}"), mirror), TEXT, timeout_s=5)) == {"tokenizer.json"}


def test_who_may_see_a_list_and_not_the_files_is_told(stand_in, tmp_path):
    folder = stand_in.hub(f"test/gated-{tmp_path.name}")
    (folder / "config.json").write_text("{}")
    source = HubSource(OnHub(f"test/{folder.name}"), HubSettings(stand_in.url, tmp_path, None, False))
    with pytest.raises(DownloadError) as caught:
        fetch(source, TEXT, timeout_s=5)
    assert str(caught.value) == (
        f"test/{folder.name}/config.json: {stand_in.url} answers 403 (Access to model test/{folder.name} is"
        " restricted). It does not exist, or is not for everybody: HF_TOKEN may be needed."
    )


def test_a_token_goes_to_the_hub_and_no_further(stand_in, tmp_path, model):
    folder = stand_in.hub(f"test/private-{tmp_path.name}")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("x" * 200_000)
    reference = OnHub(f"test/{folder.name}")
    with pytest.raises(DownloadError, match=r"answers 401 .*HF_TOKEN may be needed"):
        fetch(HubSource(reference, HubSettings(stand_in.url, tmp_path, None, False)), TEXT, timeout_s=5)
    fetch(HubSource(reference, HubSettings(stand_in.url, tmp_path, TOKEN, False)), TEXT, timeout_s=5)
    asked = [each for each in stand_in.log() if folder.name in each["path"]]
    elsewhere = [each for each in asked if each["path"].startswith("/cdn/")]
    assert elsewhere
    assert not any(each["token"] for each in elsewhere)
