"""Runs a notebook of this folder from top to bottom, and keeps what it shows.

    pip install nbclient ipykernel
    python course/notebooks.py tour       6 minutes on two CPU cores; course/tour.ipynb is replaced
    python course/notebooks.py grpo       8 minutes

It runs all cells before it writes anything: a cell that fails leaves the file as it was. Words
alone, in a cell of text, may be changed in the file without a run. Left out of the outputs are
warnings, bars of progress, this machine's paths, and the reports, which are large.
"""

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
NAMES = sorted(file.stem for file in FOLDER.glob("*.ipynb"))
LONGEST = 20_000  # characters of HTML that are kept: a report is longer
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def read(name):
    """Returns the notebook of this name as it lies in this folder."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    """Returns the cells of a notebook that hold code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook, sizes=""):
    """Runs all cells in this folder, with this Python. The first that fails raises.

    sizes: lines of Python that are added to the cell with the tag "sizes".
    """
    for cell in code_cells(notebook):
        if sizes and "sizes" in cell.metadata.get("tags", []):
            cell.source += f"\n{sizes}"
    where = {"metadata": {"path": FOLDER}}
    NotebookClient(notebook, coalesce_streams=True, record_timing=False, resources=where).execute()


def trim(notebook):
    """Keeps those outputs alone that help a reader."""
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                text = COLOURS.sub("", output.text)
                output.text = text.replace(f"{FOLDER.parent}/", "")
            if len(output.get("data", {}).get("text/html", "")) > LONGEST:
                del output.data["text/html"]
    notebook.metadata["language_info"] = {"name": "python"}  # not which version


def main(name):
    notebook, began = read(name), time.time()
    execute(notebook)
    trim(notebook)
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")
    print(f"{name}.ipynb: {time.time() - began:.0f} seconds")


if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in NAMES]:
        raise SystemExit(__doc__)
    main(sys.argv[1])
