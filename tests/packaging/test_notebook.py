"""notebooks/hex_llm.ipynb runs from its top to its end, and shows what it did when it was written."""

import copy
import re

import nbformat
import pytest

from notebooks.execute import NOTEBOOK, execute

WRITTEN = nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        notebook = copy.deepcopy(WRITTEN)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        execute(notebook)
    return notebook


def shown(cell: nbformat.NotebookNode) -> str:
    texts = (each.text if each.output_type == "stream" else each.data["text/plain"] for each in cell.outputs)
    return "".join(texts).replace("\r\n", "\n")


def tagged(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """The cells that give the same whenever they run, with what they show."""
    return [(cell.source, shown(cell)) for cell in notebook.cells if "same" in cell.metadata.get("tags", [])]


def test_every_cell_runs_without_an_error(ran):
    cells = [cell for cell in ran.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert {each.output_type for cell in cells for each in cell.outputs} <= {"stream", "execute_result"}
    assert not [each for cell in cells for each in cell.outputs if each.get("name") == "stderr"]


def test_the_answers_are_those_that_are_written_down(ran):
    assert len(tagged(ran)) == 8
    assert tagged(ran) == tagged(WRITTEN)
    assert "THE CAPITAL OF France IS Paris!" in "".join(text for _, text in tagged(ran))


def test_the_benchmark_tells_its_figures(ran):
    (report,) = [shown(cell) for cell in ran.cells if "bench serve" in cell.source and cell.cell_type == "code"]
    assert re.search(r"Successful requests: +32\n", report)
    assert float(re.search(r"Output token throughput \(tok/s\): +([0-9.]+)\n", report).group(1)) > 0


def test_nothing_is_deployed_unless_somebody_says_so():
    settings, *cells = [cell.source for cell in WRITTEN.cells if cell.cell_type == "code"]
    assert "\nDEPLOY = False " in settings
    calling = [cell for cell in cells if re.search(r"google\.cloud|deploy vertex", cell) and "--dry-run" not in cell]
    assert len(calling) == 2
    for first, *rest in (cell.splitlines() for cell in calling):
        assert first == "if DEPLOY:"
        assert all(line.startswith("    ") for line in rest if line)


def test_what_is_written_down_names_no_folder_of_the_machine_that_it_ran_on():
    texts = [shown(cell) for cell in WRITTEN.cells if cell.cell_type == "code"]
    assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|work)/", "".join(texts))
