"""An adapter as it goes to the devices of a host."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedAdapter:
    rows: np.ndarray  # [devices of this host, n]: of what `loader.adapters.pack_adapter` makes
    number: int = 0  # by which the other hosts know the rows of theirs, from 1 on; 0: there are none
