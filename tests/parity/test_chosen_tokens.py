"""Tokens chosen by devices that have a part of the vocabulary each, through the programs that accelerators run."""

from tests.checkpoints import write_llama


def test_devices_choose_what_one_device_chooses_greedily_drawn_and_by_rules(many_devices, tmp_path):
    """Of a vocabulary that they do not divide."""
    folder = write_llama(tmp_path, vocab_size=321)
    expected = many_devices.chosen(folder, 1)
    assert len({*map(tuple, expected)}) > 5
    assert many_devices.chosen(folder, 3) == expected
