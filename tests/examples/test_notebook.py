"""The notebook of examples/ runs from its first cell to its last, prints samples and draws a curve."""

import pytest
from helpers import ROOT

nbclient = pytest.importorskip("nbclient", reason="needs pip install -e '.[test]'")


@pytest.mark.thorough
def test_the_notebook_trains_looks_and_plots(tmp_path, monkeypatch):
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert any("score" in output.get("text", "") for output in shown)
