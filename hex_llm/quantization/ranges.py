"""Parts of a dimension that is read in runs only: words, and groups with a scale in common."""


def widened(part: slice, size: int, run: int) -> tuple[slice, slice]:
    """The whole runs that a part touches, and where in them the part is."""
    start, stop, _ = part.indices(size)
    first = start // run * run
    return slice(first, min(-(-stop // run) * run, size)), slice(start - first, stop - first)


def in_runs(part: slice, run: int) -> slice:
    """Whole runs, counted as runs."""
    return slice(part.start // run, -(-part.stop // run))
