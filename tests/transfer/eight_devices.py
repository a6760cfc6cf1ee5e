"""A program for the tests: engines on different numbers of the eight devices of one process hand requests over.

In a process of its own, because how many devices there are is settled when JAX starts.
"""

import sys
import tempfile

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.engine.handover import Came, Complete, Taken, Wanted
from tests.transfer.parts import End, SmallStaging

HEADS = PartitionSpec(None, None, None, "x")
WHOLE = PartitionSpec()


def staging(devices: slice, spec: PartitionSpec) -> SmallStaging:
    return SmallStaging(NamedSharding(Mesh(np.array(jax.devices()[devices]), ("x",)), spec))


def main() -> None:
    kinds = [
        staging(slice(0, 2), HEADS),
        staging(slice(4, 8), HEADS),
        staging(slice(2, 3), WHOLE),
        staging(slice(5, 8), WHOLE),
    ]
    for path in ("auto", "host"):
        with tempfile.TemporaryDirectory() as folder:
            ends = [End(f"unix:{folder}/{number}", kind, path=path) for number, kind in enumerate(kinds)]
            for source in ends:
                for target in ends:
                    if target is not source:
                        hand_over(source, target)
    print("done")


def hand_over(source: End, target: End) -> None:
    target.porter.fetch("one", source.address, 2)
    assert source.next() == Wanted("one", 2)
    for first, count in ((2, 8), (10, 3)):
        source.send("one", first, count)
        target.take(target.next(Came).part)
    source.porter.finish("one", 1)
    assert target.next(Complete)
    target.porter.acknowledge("one")
    assert source.next() == Taken("one")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
