"""Every code name of the glossary is a name of the package, and every public name that a formula has is in it."""

import ast
import re

import pytest
from notebook_rules import ROOT

PAGE = (ROOT / "chapters" / "GLOSSARY.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
HEADER, ENTRIES = ROWS[0], ROWS[1:]


def names_of_the_package():
    """Functions, classes, arguments and fields."""
    names = set()
    for path in (ROOT / "ppo_lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


NAMES = names_of_the_package()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry[0])
def test_a_row_is_complete_and_its_code_name_exists(entry):
    assert len(entry) == len(HEADER) == 9
    english, chinese, _, code, *elsewhere = entry
    assert english
    assert re.search(r"[\u4e00-\u9fff]", chinese)
    assert all(elsewhere)
    assert re.fullmatch(r"`\w+`", code)
    assert code.strip("`") in NAMES


def test_a_name_has_one_meaning():
    """Only the network is two things at once: policy and critic."""
    codes = [entry[3] for entry in ENTRIES]
    assert {code for code in codes if codes.count(code) > 1} == {"`PPONetwork`"}


@pytest.mark.parametrize("module", ["clip", "gae", "stability"])
def test_the_formulas_of_a_module_are_in_it(module):
    tree = ast.parse((ROOT / "ppo_lab" / f"{module}.py").read_text(encoding="utf-8"))
    functions = {f"`{node.name}`" for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    whole = {"`ppo_loss`", "`compute_gae`", "`monte_carlo_advantage`"}  # made of the others, or a limit of them
    assert functions - whole <= {entry[3] for entry in ENTRIES}
