"""What accelerators can do at most, each as the device that JAX shows.

Of TPUs, what Google publishes (docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e, /tpu7x: peaks, memory, and the
bandwidth between chips, there in both directions together), and what JAX's `pltpu.get_tpu_info` knows of the memories
on a chip. What is usable of the memory is what the TPU compiler says when it refuses a program. Of GPUs, NVIDIA's data
sheets (dense figures; NVLink through a switch), and the memory that the driver shows.

A chip of v4 or v5p has two cores and is one device; one of tpu7x is two devices, each with half of everything.
"""

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    name: str  # as in the name of a topology, "v5e:2x4"
    kind: str  # as JAX calls the device
    hbm: int  # bytes
    usable: int  # bytes of it that programs get
    bandwidth: float  # of it, bytes a second
    bf16: float  # operations a second
    int8: float | None  # None: no faster than bf16
    fp8: float | None
    links: int  # to neighbours; through a switch, one to all
    link: float  # bytes a second and direction, of one of them
    vmem: int | None = None  # bytes of vector memory of a core
    smem: int | None = None  # of its scalar memory

    @property
    def ring(self) -> float:
        """Bytes a second that a device can send while all do, in a ring that uses both directions."""
        return min(self.links, 2) * self.link


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            kind="TPU v4",
            hbm=32 * GIB,
            usable=2 * int(15.25 * GIB),  # the compiler's figure is of a core
            bandwidth=1200e9,
            bf16=275e12,
            int8=None,
            fp8=None,
            links=6,
            link=50e9,
            vmem=16 * MIB,
            smem=MIB,
        ),
        Chip(
            name="v5e",
            kind="TPU v5 lite",
            hbm=16 * GIB,
            usable=int(15.75 * GIB),
            bandwidth=819e9,
            bf16=197e12,
            int8=393e12,
            fp8=None,
            links=4,
            link=50e9,
            vmem=128 * MIB,
            smem=MIB,
        ),
        Chip(
            name="v5p",
            kind="TPU v5",
            hbm=96 * GIB,
            usable=int(95.73 * GIB),
            bandwidth=2765e9,
            bf16=459e12,
            int8=918e12,
            fp8=None,
            links=6,
            link=100e9,
            vmem=64 * MIB,
            smem=MIB,
        ),
        Chip(
            name="v6e",
            kind="TPU v6 lite",
            hbm=32 * GIB,
            usable=int(31.24 * GIB),
            bandwidth=1638e9,
            bf16=918e12,
            int8=1836e12,
            fp8=None,
            links=4,
            link=100e9,
            vmem=128 * MIB,
            smem=MIB,
        ),
        Chip(
            name="tpu7x",
            kind="TPU7x",
            hbm=96 * GIB,
            usable=int(94.74 * GIB),
            bandwidth=7380e9 / 2,
            bf16=2307e12 / 2,
            int8=None,
            fp8=4614e12 / 2,
            links=6,
            link=50e9,
            vmem=64 * MIB,
            smem=MIB,
        ),
        Chip(
            name="h100",
            kind="NVIDIA H100 80GB HBM3",
            hbm=int(79.6 * GIB),
            usable=int(79.6 * GIB),
            bandwidth=3350e9,
            bf16=989e12,
            int8=1979e12,
            fp8=1979e12,
            links=1,
            link=450e9,
        ),
        Chip(
            name="h200",
            kind="NVIDIA H200",
            hbm=int(140.4 * GIB),
            usable=int(140.4 * GIB),
            bandwidth=4800e9,
            bf16=989e12,
            int8=1979e12,
            fp8=1979e12,
            links=1,
            link=450e9,
        ),
    )
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology, "v5e:2x4"."""
    return CHIPS[topology.partition(":")[0]]
