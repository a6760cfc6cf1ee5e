"""Runs the notebook from its top to its end, and writes down in it what came out.

.venv/bin/python -m notebooks.execute
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("hex_llm.ipynb")


def execute(notebook: nbformat.NotebookNode) -> None:
    """In place, in the notebook's folder; a cell that fails raises."""
    client = NotebookClient(
        notebook,
        timeout=300,
        record_timing=False,  # or every run would change every cell
        coalesce_streams=True,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    client.execute()


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    execute(notebook)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
