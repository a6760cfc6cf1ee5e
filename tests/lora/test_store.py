"""Adapters are fetched from where they lie: only those that may be, once, and as they are now."""

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from hex_llm.download.hub import HubSource
from hex_llm.errors import AdapterError, AdapterNotAllowed, AdapterNotFound, AdapterUnavailable
from hex_llm.lora import failures, files
from hex_llm.lora.adapter import open_adapter
from hex_llm.lora.store import Store
from tests.download.servers import running_emulator
from tests.lora.adapters import MODULES, write_good

ALLOWED = ["gs://adapters/", "hf:adapters/"]
NAMES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture(params=["hub", "bucket"])
def place(request, stand_in, tmp_path):
    """A source with an adapter and things beside it, and the folder that it is made of."""
    name = f"adapters/of-{tmp_path.name}"
    folder = stand_in.hub(name) if request.param == "hub" else stand_in.bucket(name)
    write_good(folder)
    for other in ("adapter_model.bin", "optimizer.pt", "README.md", "train.py"):
        (folder / other).write_bytes(b"unwanted")
    return (name if request.param == "hub" else f"gs://{name}"), folder


def make_store(tmp_path, **settings):
    return Store(tmp_path / "cache", ALLOWED, **settings)


def names(folder):
    return {path.name for path in folder.iterdir()} - {".lock"}


def same(folder, made):
    return names(folder) == NAMES and all((folder / name).read_bytes() == (made / name).read_bytes() for name in NAMES)


def asked(stand_in, folder, *, files=True, lists=True):
    """The requests that had to do with a source, but for those that are sent on."""
    own = [each["path"] for each in stand_in.log() if folder.name in each["path"] and "pageToken" not in each["path"]]
    is_list = lambda path: "/api/models" in path or "/o?prefix" in path  # noqa: E731
    return [path for path in own if (lists if is_list(path) else files) and "/cdn/" not in path]


def replace(folder, seed):
    """Another adapter under the same names."""
    for name in NAMES:
        (folder / name).unlink()
    write_good(folder, seed=seed)


def test_an_adapter_comes_with_its_files_and_no_others(place, stand_in, tmp_path):
    source, made = place
    with make_store(tmp_path).fetch(source) as fetched:
        assert same(fetched.folder, made)
        assert fetched.folder == tmp_path / "cache" / fetched.identity
        assert set(open_adapter(fetched.folder, MODULES, 8).read()) == set(MODULES)
    assert not [path for path in asked(stand_in, made, lists=False) if "adapter_" not in path or ".bin" in path]


def test_what_is_here_is_not_downloaded_again_and_for_some_seconds_not_asked_for(place, stand_in, tmp_path):
    source, made = place
    store = make_store(tmp_path)
    first = store.fetch(source)
    before = len(asked(stand_in, made))
    second = store.fetch(source)
    assert (second.identity, second.folder) == (first.identity, first.folder)
    assert store.identify(source) == first.identity
    assert len(asked(stand_in, made)) == before
    assert make_store(tmp_path).fetch(source).identity == first.identity
    assert len(asked(stand_in, made, lists=False)) == 2
    assert len(asked(stand_in, made, files=False)) == 2


def test_to_identify_an_adapter_is_not_to_download_it(place, stand_in, tmp_path):
    source, made = place
    store = make_store(tmp_path)
    identity = store.identify(source)
    assert len(identity) == 64
    assert not asked(stand_in, made, lists=False)
    assert store.fetch(source).identity == identity


def test_a_source_has_one_identity_by_all_its_names(stand_in, tmp_path):
    name = f"adapters/of-{tmp_path.name}"
    write_good(stand_in.hub(name))
    write_good(stand_in.bucket(name))
    store = make_store(tmp_path)
    assert len({store.identify(each) for each in (name, f"hf:{name}", f"{name}@main", f"hf:{name}@main")}) == 1
    assert len({store.identify(each) for each in (f"gs://{name}", f"gs://{name}/")}) == 1
    assert store.identify(name) != store.identify(f"gs://{name}")


def test_files_beside_an_adapter_and_below_it_do_not_make_it_another(place, tmp_path, monkeypatch):
    source, made = place
    store = make_store(tmp_path, ask_again_s=0)
    before = store.identify(source)
    (made / "README.md").write_text("another")
    list_files = HubSource.list

    def with_folders(self, patience):
        listing = list_files(self, patience)
        below = dataclasses.replace(listing.files["README.md"], name="checkpoint-5/adapter_model.safetensors")
        return dataclasses.replace(listing, files={**listing.files, below.name: below})

    monkeypatch.setattr(HubSource, "list", with_folders)
    assert store.identify(source) == before
    assert same(store.fetch(source).folder, made)


@pytest.mark.parametrize(
    "source",
    [
        "gs://others/adapter",
        "gs://adapters/../others",
        "gs://adapters/%2e%2e/x",
        "hf:gs://adapters/x",
        "others/name",
        "hf:hf:adapters/x",
        "adapters",
        "/etc",
        "{folder}",
        "file:///etc",
        "https://host/adapters/x",
        "",
        "gs://adapters/" + "x" * 2000,
        "gs://adapters/x\n",
    ],
)
def test_what_is_under_no_prefix_is_refused_and_nobody_is_asked(source, stand_in, tmp_path):
    folder = write_good(tmp_path / "adapter")
    store = make_store(tmp_path, named=[str(tmp_path / "other")])
    before = len(stand_in.log())
    for ask in (store.identify, store.fetch):
        with pytest.raises(
            AdapterNotAllowed, match=r"\(--lora_modules\), nor under one of the prefixes .* \(--lora_allowed_prefixes\)"
        ) as caught:
            ask(source.format(folder=folder))
        assert (caught.value.status, caught.value.code) == (403, "adapter_not_allowed")
        assert len(str(caught.value)) < 300
    assert len(stand_in.log()) == before


def test_who_runs_the_server_may_name_folders_and_what_is_under_no_prefix(stand_in, tmp_path):
    folder = write_good(tmp_path / "adapter")
    write_good(stand_in.bucket(f"elsewhere/{tmp_path.name}"))
    elsewhere = f"gs://elsewhere/{tmp_path.name}"
    store = make_store(tmp_path, named=[str(folder), elsewhere, str(tmp_path / "none")])
    with store.fetch(str(folder)) as fetched:
        assert (fetched.folder, fetched.identity) == (folder, store.identify(str(folder)))
    assert same(store.fetch(elsewhere).folder, folder)
    with pytest.raises(AdapterNotFound, match="none is no folder on the server's machine"):
        store.fetch(str(tmp_path / "none"))


def test_a_folder_is_another_adapter_once_one_of_its_files_is(tmp_path):
    folder = write_good(tmp_path / "adapter")
    store = make_store(tmp_path, named=[str(folder)])
    identities = [store.identify(str(folder))]
    (folder / "README.md").write_text("nothing")
    assert store.identify(str(folder)) == identities[0]
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    identities.append(store.identify(str(folder)))
    (folder / "adapter_config.json").write_text("{}")
    identities.append(store.identify(str(folder)))
    assert len(set(identities)) == 3
    with pytest.raises(AdapterUnavailable, match="has become another adapter in the meantime"):
        store.fetch(str(folder), identities[0])
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"adapter has no adapter_config\.json"):
        store.fetch(str(folder))


def test_what_does_not_exist_or_may_not_be_read_is_not_found(stand_in, tmp_path):
    stand_in.bucket("adapters")
    store = Store(tmp_path / "cache", [*ALLOWED, "gs://private-bucket", "gs://no-bucket"])
    for source in (
        "adapters/none",
        "gs://adapters/none",
        "adapters/private",
        "gs://private-bucket/x",
        "gs://no-bucket",
    ):
        with pytest.raises(AdapterNotFound, match=source.split("/")[-1]) as caught:
            store.fetch(source)
        assert (caught.value.status, caught.value.code) == (404, "adapter_not_found")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), r"has no adapter_config\.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "it has adapter_model.bin, a format that is"),
        (
            lambda folder: [(folder / f"adapter_model-{i}.safetensors").touch() for i in range(15)],
            "has 17 files; .* 16",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(bytes(200_000)), "has 0.20 MB; .* 0.15 MB"),
    ],
)
def test_what_can_be_no_adapter_is_refused_before_the_first_byte(change, words, place, stand_in, tmp_path, monkeypatch):
    source, made = place
    change(made)
    monkeypatch.setattr(files, "MOST_BYTES", 150_000)
    store = make_store(tmp_path)
    for _ in range(3):
        with pytest.raises(AdapterError, match=words) as caught:
            store.fetch(source)
        assert caught.value.code == "adapter_invalid"
    assert len(asked(stand_in, made)) == 1


def test_a_source_of_no_use_is_asked_once_however_often_it_is_asked_for(stand_in, tmp_path, monkeypatch):
    folder = stand_in.hub(f"adapters/none-{tmp_path.name}")
    folder.rmdir()
    store, source = make_store(tmp_path), f"adapters/{folder.name}"

    def refused(_: int) -> bool:
        with pytest.raises(AdapterNotFound):
            store.fetch(source)
        return True

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(refused, range(200)))
    assert len(asked(stand_in, folder)) == 1
    write_good(folder)
    assert refused(0)
    store._failures._errors[source] = (time.monotonic(), store._failures._errors[source][1])
    store.fetch(source)


def test_a_failure_is_not_remembered_longer_because_it_is_told(monkeypatch):
    monkeypatch.setattr(failures, "_REQUEST_S", 0.5)
    known, until = failures.Failures(), time.monotonic() + 10
    known.remember("x", AdapterError("wrong"))
    with pytest.raises(AdapterError, match="wrong"):
        known.check("x")
    count = 0
    while time.monotonic() < until:
        try:
            known.check("x")
        except AdapterError as error:
            known.remember("x", error)
            count += 1
            time.sleep(0.05)
        else:
            break
    assert 1 <= count < 20


def test_an_adapter_found_to_be_of_no_use_is_refused_at_once_until_it_is_another(place, tmp_path):
    source, made = place
    store = make_store(tmp_path, ask_again_s=0)
    with store.fetch(source) as fetched:
        store.refuse(fetched.identity, AdapterError("It holds NaN."))
    for ask in (store.fetch, store.identify, lambda source: store.fetch(source, fetched.identity)):
        with pytest.raises(AdapterError, match="It holds NaN"):
            ask(source)
    replace(made, seed=1)
    assert store.fetch(source).identity != fetched.identity


@pytest.mark.parametrize(
    "fault",
    [
        {"match": r"/o\?prefix|/api/models", "status": 503, "times": 1000},
        {"match": "adapter_config", "status": 503, "times": 1000},
        {"match": "adapter_config", "flip": True, "times": 1000},
        {"match": "adapter_config", "stall": 30, "cut": 0.5, "times": 1000},
        {"match": "adapter_config", "bytes_a_second": 50, "times": 1000},
    ],
    ids=str,
)
def test_what_does_not_come_in_time_is_told_and_leaves_no_adapter(fault, place, stand_in, tmp_path):
    source, made = place
    stand_in.set_faults(fault)
    store = make_store(tmp_path, timeout_s=2)
    started = time.monotonic()
    with pytest.raises(AdapterUnavailable) as caught:
        store.fetch(source)
    assert time.monotonic() - started < 6
    assert (caught.value.status, caught.value.code) == (503, "adapter_unavailable")
    assert made.name in str(caught.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]


def test_what_took_too_long_is_not_gone_on_with(place, stand_in, tmp_path):
    stand_in.set_faults({"match": "adapter_config", "bytes_a_second": 50})
    before = set(threading.enumerate())
    with pytest.raises(AdapterUnavailable, match="could not be had within 1 s"):
        make_store(tmp_path, timeout_s=1).fetch(place[0])
    deadline = time.monotonic() + 8  # the file would take 20
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_passes_is_got_over(place, stand_in, tmp_path):
    source, made = place
    stand_in.set_faults(
        {"match": "adapter_model", "status": 503, "times": 2}, {"match": "adapter_config", "reset": True, "cut": 0.5}
    )
    assert same(make_store(tmp_path).fetch(source).folder, made)


def test_those_who_ask_at_the_same_time_share_one_download(place, stand_in, tmp_path):
    source, made = place
    stand_in.set_faults({"match": "adapter_config", "bytes_a_second": 500})
    store = make_store(tmp_path)
    with ThreadPoolExecutor(32) as threads:
        fetched = list(threads.map(lambda _: store.fetch(source), range(32)))
    assert len({each.identity for each in fetched}) == 1
    assert same(fetched[0].folder, made)
    assert len(asked(stand_in, made)) == 1 + 2


FETCH = """
import sys
from pathlib import Path
from hex_llm.lora.store import Store
fetched = Store(Path(sys.argv[2]), ["gs://adapters/", "adapters/"]).fetch(sys.argv[1])
print(fetched.identity, flush=True)
sys.stdin.read()
"""


def fetching(source, stand_in, cache):
    """Another process that fetches, and keeps what it has until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, source, str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | stand_in.environment,
    )


def test_processes_that_fetch_at_the_same_time_download_once(place, stand_in, tmp_path):
    source, made = place
    stand_in.set_faults({"match": "adapter_config", "bytes_a_second": 300})
    processes = [fetching(source, stand_in, tmp_path / "cache") for _ in range(2)]
    (identity,) = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert same(tmp_path / "cache" / identity, made)
    assert len(asked(stand_in, made, lists=False)) == 2


def test_who_comes_after_one_that_was_killed_goes_on_where_it_was(place, stand_in, tmp_path):
    source, made = place
    stand_in.set_faults({"match": "adapter_model", "stall": 60, "cut": 0})
    process = fetching(source, stand_in, tmp_path / "cache")
    deadline = time.monotonic() + 30
    while not list((tmp_path / "cache").glob(".part-*/adapter_config.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert same(make_store(tmp_path).fetch(source).folder, made)
    assert len([path for path in asked(stand_in, made, lists=False) if "adapter_config" in path]) == 1
    assert not list((tmp_path / "cache").glob(".part-*"))


def test_another_object_is_another_adapter_and_the_one_before_stays_with_its_users(place, tmp_path):
    source, made = place
    store = make_store(tmp_path, ask_again_s=0)
    first = store.fetch(source)
    before = (first.folder / "adapter_model.safetensors").read_bytes()
    replace(made, seed=1)
    second = store.fetch(source)
    assert second.identity != first.identity
    assert same(second.folder, made)
    assert (first.folder / "adapter_model.safetensors").read_bytes() == before


def test_with_an_identity_what_is_here_is_not_asked_for_and_nothing_else_is_taken(place, stand_in, tmp_path):
    source, made = place
    store = make_store(tmp_path, ask_again_s=0)
    identity = store.fetch(source).identity
    replace(made, seed=1)
    before = len(asked(stand_in, made))
    assert store.fetch(source, identity).identity == identity
    assert len(asked(stand_in, made)) == before
    shutil.rmtree(tmp_path / "cache" / identity)
    with pytest.raises(AdapterUnavailable, match="has become another adapter"):
        store.fetch(source, identity)
    assert len(asked(stand_in, made, lists=False)) == 2


def test_what_is_replaced_between_the_question_and_the_download_is_asked_for_again(place, tmp_path):
    source, made = place
    store = make_store(tmp_path, ask_again_s=1000)
    before = store.identify(source)
    replace(made, seed=1)
    if source.startswith("gs://"):
        with pytest.raises(AdapterUnavailable, match="has become another adapter"):
            store.fetch(source, before)
        fetched = store.fetch(source)
        assert fetched.identity != before
        assert same(fetched.folder, made)
    else:  # this stand-in for the hub has no commits: it has the old one be damaged
        with pytest.raises(AdapterUnavailable, match="came damaged twice"):
            store.fetch(source)


def test_a_source_that_does_not_answer_is_what_it_was(place, stand_in, tmp_path, monkeypatch):
    source, _ = place
    store = make_store(tmp_path, ask_again_s=0)
    identity = store.identify(source)
    monkeypatch.setattr("hex_llm.lora.store._ASK_S", 0.5)
    stand_in.set_faults({"match": r"/o\?prefix|/api/models", "status": 503, "times": 1000})
    with store.fetch(source) as fetched:
        assert fetched.identity == identity
    stand_in.set_faults({"match": r"/o\?prefix|/api/models", "status": 404, "times": 1000})
    with pytest.raises(AdapterNotFound):
        store.fetch(source)


def write_many(stand_in, tmp_path, count):
    folders = [stand_in.bucket(f"adapters/{tmp_path.name}-{number}") for number in range(count)]
    for number, folder in enumerate(folders):
        write_good(folder, seed=number)
    return [f"gs://adapters/{folder.name}" for folder in folders], sum(
        (folders[0] / name).stat().st_size for name in NAMES
    )


def test_what_was_not_used_for_longest_goes_first(stand_in, tmp_path):
    sources, num_bytes = write_many(stand_in, tmp_path, 4)
    store = make_store(tmp_path, most_bytes=3 * num_bytes + 10)
    folders = []
    for number in (0, 1, 2, 0, 3):  # 1 is the oldest when 3 comes
        with store.fetch(sources[number]) as fetched:
            folders.append(fetched.folder)
        time.sleep(0.01)
    assert [folder.exists() for folder in folders] == [True, False, True, True, True]
    assert names(tmp_path / "cache") == {folder.name for folder in folders if folder.exists()}


def test_what_is_in_use_stays_here_and_in_other_processes(stand_in, tmp_path):
    sources, num_bytes = write_many(stand_in, tmp_path, 4)
    process = fetching(sources[0], stand_in, tmp_path / "cache")
    assert process.stdout is not None
    theirs = tmp_path / "cache" / process.stdout.readline().strip()
    store = make_store(tmp_path, most_bytes=2 * num_bytes + 10)
    ours = store.fetch(sources[1])
    with pytest.raises(AdapterUnavailable, match=rf"The server has no room on its disk for {sources[2]}"):
        store.fetch(sources[2])
    assert theirs.exists()
    assert ours.folder.exists()
    process.communicate()
    with store.fetch(sources[3]) as fetched:
        assert [folder.exists() for folder in (theirs, ours.folder, fetched.folder)] == [False, True, True]


def test_no_room_on_the_disk_is_told_without_its_paths(place, tmp_path, monkeypatch):
    monkeypatch.setattr("hex_llm.download.fetch.free_bytes", lambda folder: 1000)
    with pytest.raises(AdapterUnavailable) as caught:
        make_store(tmp_path).fetch(place[0])
    assert str(caught.value) == f"The server has no room on its disk for {place[0]}."


def test_without_a_cache_files_go_with_their_last_user(place, stand_in, tmp_path):
    source, made = place
    store = make_store(tmp_path, keep=False)
    first, second = store.fetch(source), store.fetch(source)
    first.close()
    first.close()
    assert same(second.folder, made)
    second.close()
    assert not names(tmp_path / "cache")
    assert store.fetch(source).identity == first.identity
    assert len(asked(stand_in, made, lists=False)) == 4


def test_without_a_cache_who_waits_is_a_user(place, stand_in, tmp_path):
    source, made = place
    stand_in.set_faults({"match": "adapter_config", "bytes_a_second": 500})
    store = make_store(tmp_path, keep=False)

    def use(_: int) -> bool:
        with store.fetch(source) as fetched:
            return same(fetched.folder, made)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(use, range(16)))
    assert not names(tmp_path / "cache")
    assert len(asked(stand_in, made, lists=False)) == 2


def test_many_threads_in_a_small_cache_always_have_what_they_asked_for(stand_in, tmp_path):
    sources, num_bytes = write_many(stand_in, tmp_path, 6)
    store = make_store(tmp_path, most_bytes=4 * num_bytes + 10)
    identities = [store.identify(source) for source in sources]
    wrong = []

    def use(number: int) -> None:
        for turn in range(12):
            which = (number * 5 + turn * (number + 1)) % len(sources)
            with store.fetch(sources[which]) as fetched:
                if fetched.identity != identities[which] or names(fetched.folder) != NAMES:
                    wrong.append(which)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(names(tmp_path / "cache")) <= 4


def test_what_another_left_half_removed_is_removed(tmp_path):
    left = tmp_path / "cache" / ".gone-x"
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").touch()
    make_store(tmp_path)
    assert not left.exists()


def test_a_disk_that_fails_is_told_without_its_paths(place, tmp_path):
    store = make_store(tmp_path)
    identity = store.identify(place[0])
    (tmp_path / "cache" / f".part-{identity}").write_text("a file")
    with pytest.raises(AdapterUnavailable) as caught:
        store.fetch(place[0])
    assert str(caught.value) == f"The server's disk does not take {place[0]}."


def test_offline_the_hub_is_not_asked(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(stand_in.log())
    with pytest.raises(AdapterUnavailable, match="HF_HUB_OFFLINE forbids to ask the hub for adapters/x"):
        make_store(tmp_path).fetch("adapters/x")
    assert len(stand_in.log()) == before


def test_a_real_emulator_of_cloud_storage(tmp_path, monkeypatch):
    made = write_good(tmp_path / "made", num_files=3)
    with running_emulator("adapters", made, "some/where/") as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        with make_store(tmp_path).fetch("gs://adapters/some/where") as fetched:
            assert names(fetched.folder) == names(made)
            found = open_adapter(fetched.folder, MODULES, 8).read()
    assert {name: pair[1].sum() for name, pair in found.items()} == {
        name: pair[1].sum() for name, pair in open_adapter(Path(made), MODULES, 8).read().items()
    }
