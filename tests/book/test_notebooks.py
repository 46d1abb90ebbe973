"""Every notebook and every Markdown page of the book keeps the rules of notebook_rules.py."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from notebook_rules import ROOT, RULES, broken_links

CHAPTERS = ROOT / "chapters"
NOTEBOOKS = sorted(p for p in CHAPTERS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
PAGES = sorted([*ROOT.glob("*.md"), *CHAPTERS.rglob("*.md"), *ROOT.glob("data/**/*.md")])


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=short)
def test_notebook(path, rule):
    assert rule(json.loads(path.read_text(encoding="utf-8")), path) == []


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_links_of_a_page_lead_somewhere(path):
    assert broken_links(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.slow
@pytest.mark.parametrize("place", ["the repository", "anywhere"])
def test_a_notebook_runs_from_any_folder(place, tmp_path):
    """nbval runs it from the third one, its own."""
    folder = ROOT if place == "the repository" else tmp_path
    start = nbformat.read(CHAPTERS / "00_start_here.ipynb", as_version=4)
    NotebookClient(start, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    printed = "".join(output.get("text", "") for cell in start.cells for output in cell.get("outputs", []))
    assert "OK" in printed
    assert "FAIL" not in printed
