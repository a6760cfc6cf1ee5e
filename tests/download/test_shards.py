"""A disk too small for the model: its files come one after the other, and go once their weights are on the devices."""

import itertools
import shutil

import jax
import numpy as np
import pytest

from hex_llm.download import fetch as fetch_module
from hex_llm.download.fetch import fetch
from hex_llm.download.shards import open_shards
from hex_llm.download.wanted import MODEL
from hex_llm.engine.request import SamplingParams
from hex_llm.errors import CheckpointError, DownloadError, NoSpace
from hex_llm.llm import LLM
from hex_llm.loader.config_json import read_config
from hex_llm.loader.contents import check_checkpoint
from hex_llm.loader.model_checkpoint import open_model
from hex_llm.loader.weights import load
from hex_llm.models.registry import family
from hex_llm.parallel.mesh import make_mesh
from tests.checkpoints import llama_config, random_tensors, write_llama, write_tensors

SHARDS = [f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """In five files, whose borders lie within layers."""
    return write_llama(tmp_path_factory.mktemp("made") / "model", num_files=5)


@pytest.fixture
def small_disk(monkeypatch, model):
    """Room for any two files that follow each other, and not for all five."""
    sizes = [(model / name).stat().st_size for name in SHARDS]
    room = max(map(sum, itertools.pairwise(sizes)))
    assert room < sum(sizes)
    monkeypatch.setattr(fetch_module, "_SPARE", 0)

    def free(folder):
        here = folder / "streamed" if (folder / "streamed").is_dir() else folder
        used = sum(path.stat().st_size for path in here.glob("model-*.safetensors"))
        return room - used

    monkeypatch.setattr(fetch_module, "free_bytes", free)


def loaded(files, folder):
    config = read_config(folder)
    weights = family(config.arch).weights
    checkpoint = open_model(files, family(config.arch))
    check_checkpoint(weights, config.arch, checkpoint)
    return load(weights, config.arch, checkpoint, make_mesh(1), np.float32)


def test_weights_are_the_same_and_no_file_stays(source, model, stand_in, small_disk):
    with pytest.raises(NoSpace):
        fetch(source, MODEL, timeout_s=5)
    shards = open_shards(source, timeout_s=5)
    streamed = loaded(shards, shards.folder)
    expected = loaded(model, model)
    jax.tree.map(np.testing.assert_array_equal, streamed, expected)
    left = [path for path in source.store.folder.rglob("*") if "safetensors" in path.name and "index" not in path.name]
    assert left == []


def test_a_source_is_listed_once(source, stand_in, small_disk):
    before = len(stand_in.log())
    open_shards(source, timeout_s=5)
    listed = [each for each in stand_in.log()[before:] if "/api/models" in each["path"] or "/o?prefix" in each["path"]]
    assert len([each for each in listed if "pageToken" not in each["path"]]) == 1


def test_a_server_that_sends_no_parts_of_files_is_told(source, stand_in, small_disk):
    shards = open_shards(source, timeout_s=5)
    stand_in.set_faults({"match": SHARDS[0], "no_ranges": True, "times": 10})
    with pytest.raises(DownloadError, match=f"{SHARDS[0]}: .* sends no parts of files"):
        open_model(shards, family(read_config(shards.folder).arch))


def test_a_model_answers_the_same_from_a_disk_too_small_for_it(stand_in, model, small_disk, tmp_path, caplog):
    shutil.copytree(model, stand_in.bucket("models/streamed"), dirs_exist_ok=True)
    settings = {"max_model_len": 64, "num_blocks": 64, "block_size": 8, "max_decode_seqs": 4, "prefill_len_padding": 64}
    settings |= {"warmup": False, "decode_blocks_padding": 1}
    sampling = SamplingParams(temperature=0, max_tokens=8)
    remote = LLM("gs://models/streamed", download_dir=str(tmp_path), **settings)
    assert "Until there is room, each start streams the weights" in caplog.text
    local = LLM(str(model), **settings)
    texts = [llm.generate("hello", sampling)[0].outputs[0].token_ids for llm in (remote, local)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 8
    assert not list(tmp_path.rglob("*-of-00005.safetensors"))


def test_a_file_that_nobody_needs_never_comes_and_one_that_is_done_goes(source, stand_in, small_disk):
    shards = open_shards(source, timeout_s=5)
    needs = [{SHARDS[0]}, {SHARDS[0], SHARDS[1]}, {SHARDS[1]}, {SHARDS[4]}]
    folder = shards.path("x").parent
    seen = [(ready, sorted(path.name for path in folder.iterdir())) for ready in shards.in_turn(needs)]
    assert seen == [([0], SHARDS[:1]), ([1, 2], SHARDS[:2]), ([3], SHARDS[4:])]
    assert not folder.exists()


def test_the_next_start_clears_what_a_killed_one_left(source, stand_in, small_disk):
    shards = open_shards(source, timeout_s=5)
    folder = shards.path("x").parent
    folder.mkdir(parents=True)
    (folder / "model-00009.safetensors").write_text("left behind")
    next(turns := shards.in_turn([{SHARDS[0]}]))
    assert [path.name for path in folder.iterdir()] == SHARDS[:1]
    turns.close()
    assert not folder.exists()


def test_a_disk_too_small_for_one_file_is_told(source, no_room):
    no_room(64 * 2**20 + 50_000)
    with pytest.raises(NoSpace, match=r"-of-00005.safetensors needs .* more on the disk"):
        open_shards(source, timeout_s=5)


def test_what_headers_tell_is_checked_before_a_file_comes(source, model, stand_in, small_disk):
    own = str(source).split("/")[-1]
    (folder,) = (path for path in stand_in.root.glob(f"*/*/{own}") if path.is_dir())
    shutil.rmtree(folder)
    config = llama_config()
    tensors = random_tensors(config)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    write_llama(folder, num_files=5)
    write_tensors(folder, tensors, num_files=5)
    shards = open_shards(source, timeout_s=5)
    with pytest.raises(CheckpointError, match=r"model.norm.weight .* has shape \[63\]"):
        loaded(shards, shards.folder)
    assert not shards.path("x").parent.exists()


def test_a_damaged_file_ends_the_load_and_leaves_nothing(source, stand_in, small_disk):
    shards = open_shards(source, timeout_s=5)
    checkpoint = open_model(shards, family(read_config(shards.folder).arch))
    assert len(checkpoint) > 10
    stand_in.set_faults({"match": SHARDS[2], "flip": True, "times": 1000})
    with pytest.raises(DownloadError, match=f"{SHARDS[2]} came damaged twice"):
        for _ in checkpoint.in_turn([{name} for name in checkpoint]):
            pass
    assert not shards.path("x").parent.exists()


def test_values_are_looked_at_before_their_file_comes(source, model, small_disk):
    shards = open_shards(source, timeout_s=5)
    local, remote = (open_model(each, family(read_config(model).arch)) for each in (model, shards))
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        for index in ((), (slice(3, 7),), (slice(0, 64),)):
            np.testing.assert_array_equal(remote[name][index], local[name][index])
    index = (slice(2, 9), slice(1, 5))
    np.testing.assert_array_equal(remote["lm_head.weight"][index], local["lm_head.weight"][index])
