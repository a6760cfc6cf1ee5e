"""What is kept on the disk, and what gives way."""

import pytest

from hex_llm.download.patience import Patience
from hex_llm.errors import NoSpace
from hex_llm.lora.disk import Disk


def fill(disk, name, num_bytes=50):
    with disk.fill(name, num_bytes, Patience(5)) as folder:
        (folder / "file").write_bytes(bytes(num_bytes))


def fail(disk, name, num_bytes=50):
    with disk.fill(name, num_bytes, Patience(5)) as folder:
        (folder / "half").write_bytes(bytes(num_bytes))
        raise RuntimeError


def test_a_folder_has_its_name_once_it_is_whole(tmp_path):
    disk = Disk(tmp_path, 100)
    with disk.fill("a", 50, Patience(5)) as folder:
        assert folder is not None
        (folder / "file").touch()
        assert disk.hold("a") is None
    with disk.fill("a", 50, Patience(5)) as folder:
        assert folder is None
    held = disk.hold("a")
    assert held is not None
    assert (held.folder / "file").exists()
    disk.remove("a")
    assert held.folder.exists()
    held.close()
    disk.remove("a")
    assert not list(tmp_path.iterdir())


def test_what_fails_has_no_name_and_what_it_left_is_found_again(tmp_path):
    disk = Disk(tmp_path, 100)
    with pytest.raises(RuntimeError):
        fail(disk, "a")
    assert disk.hold("a") is None
    with disk.fill("a", 50, Patience(5)) as folder:
        assert folder is not None
        assert (folder / "half").exists()


def test_what_is_on_its_way_takes_room_and_does_not_give_way(tmp_path):
    disk = Disk(tmp_path, 100)
    with disk.fill("a", 60, Patience(5)), pytest.raises(NoSpace, match=r"beyond the 100 bytes that .* may have"):
        fill(disk, "b", 60)
    fill(disk, "b", 60)


def test_what_was_left_half_done_gives_way(tmp_path):
    disk = Disk(tmp_path, 100)
    with pytest.raises(RuntimeError):
        fail(disk, "a", 60)
    fill(disk, "b", 60)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_what_is_larger_than_all_drives_nobody_out(tmp_path):
    disk = Disk(tmp_path, 100)
    fill(disk, "a")
    with pytest.raises(NoSpace, match="101 bytes are more than the 100 bytes"):
        fill(disk, "b", 101)
    assert (tmp_path / "a").exists()


def test_others_files_are_left_alone(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(90))
    disk = Disk(tmp_path, 100)
    with pytest.raises(NoSpace):
        fill(disk, "a")
    assert (tmp_path / "folder" / "file").exists()
    assert (tmp_path / "file").exists()
