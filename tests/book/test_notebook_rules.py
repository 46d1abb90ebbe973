"""The rules bite: a good small notebook passes every one, and each bad change is found by the rule meant for it."""

import copy
import json
from pathlib import Path

import notebook_rules as rules
import pytest
from notebook_rules import RULES, broken_links


def markdown(source):
    return {"cell_type": "markdown", "id": f"m{abs(hash(str(source)))}", "metadata": {}, "source": source}


def code(source, *outputs, count=1, tags=()):
    metadata = {"tags": list(tags)} if tags else {}
    kind = {"cell_type": "code", "id": f"c{abs(hash(str(source)))}", "metadata": metadata, "execution_count": count}
    return kind | {"source": source, "outputs": list(outputs)}


def printed(body, name="stdout"):
    return {"output_type": "stream", "name": name, "text": body}


def shown(**data):
    data = {kind.replace("_", "/"): body for kind, body in data.items()}
    return {"output_type": "display_data", "metadata": {}, "data": data}


PICTURE = shown(image_png="aGVsbG8=", text_plain="<Figure size 704x374 with 1 Axes>")
SLIDER = shown(text_plain="interactive(children=(FloatSlider(value=0.2), Output()), _dom_classes=('widget-int…")


def notebook(*cells):
    return {"cells": list(cells), "metadata": copy.deepcopy(rules.METADATA), "nbformat": 4, "nbformat_minor": 5}


GOOD = notebook(
    markdown("# A title\n\nSee [the next part](#The-next-part), [itself](00_x.ipynb) and `[code](nowhere.md)`."),
    code("x = 1.25\nprint(f'{x:.3f}')", printed("1.250\n")),
    markdown("## The next part\n\nThe sum is $[a](b)$ and [more](https://example.org)."),
    code("draw()", PICTURE, count=2),
    markdown("*Figure: a line that rises\nfrom 0 to $J^*$.* Then text."),
    code("slide()", SLIDER, count=3, tags=["nbval-ignore-output"]),
    code("seconds = run()\nprint(seconds)", printed("0.12345678\n"), count=4, tags=["nbval-ignore-output"]),
    code("assert seconds < 60", count=5),
)

BAD_CELLS = [
    (rules.has_short_code, code("x = " + "1 + " * 21 + "1")),  # 89 columns
    (rules.has_short_code, code("x = 1\n" * 26)),
    (rules.begins_with_a_title, markdown("## Not a title")),
    (rules.begins_with_a_title, code("# a comment")),
    (rules.is_plain_python, code("%matplotlib inline")),
    (rules.is_plain_python, code("!ls")),
    (rules.swallows_no_error, code("try:\n    f()\nexcept:\n    pass")),
    (rules.swallows_no_error, code("try:\n    f()\nexcept Exception as e:\n    print(e)")),
    (rules.uses_no_path_tricks, code("import sys\nsys.path.append('..')")),
    (rules.uses_no_path_tricks, code("import os\nos.chdir('x')")),
    (rules.uses_no_path_tricks, code("open('../data/x.csv')")),
    (rules.installs_and_fetches_nothing, code("run('pip install torch')")),
    (rules.installs_and_fetches_nothing, code("run('apt-get install swig')")),
    (rules.installs_and_fetches_nothing, code("import urllib.request")),
    (rules.installs_and_fetches_nothing, code("load('https://example.org/x')")),
    (rules.installs_and_fetches_nothing, markdown("![a picture](https://example.org/x.png)")),
    (rules.installs_and_fetches_nothing, code("f()", shown(text_html="<img src='//example.org/x.png'>"))),
    (rules.names_no_machine, code("open('/home/ann/x.csv')")),
    (rules.names_no_machine, markdown("It lies in /Users/ann/lab.")),
    (rules.names_no_machine, code("f()", printed(f"saved to {rules.ROOT}/runs\n"))),
    (rules.names_no_machine, code("f()", printed("C:\\Users\\ann\n"))),
    (rules.names_the_living_lander, markdown("Fly `LunarLander-v2`.")),
    (rules.names_the_living_lander, code("make('LunarLander-v2')")),
    (rules.shows_every_last_value, code("plot();")),
    (rules.was_executed_in_order, code("f()", count=None)),
    (rules.was_executed_in_order, code("f()", count=7)),
    (rules.stores_no_error_and_no_warning, code("f()", {"output_type": "error", "ename": "E", "evalue": ""})),
    (rules.stores_no_error_and_no_warning, code("f()", printed("DeprecationWarning: old\n", name="stderr"))),
    (rules.stores_no_error_and_no_warning, code("f()", shown(text_plain="100%|###| 10/10 [00:01<00:00, 9.1it/s]"))),
    (rules.stores_only_what_repeats, code("f", shown(text_plain="<function f at 0x7f0c12345678>"))),
    (rules.stores_only_what_repeats, code("print(x)", printed("0.30000000000000004\n"))),
    (rules.stores_only_what_repeats, code("slide()", SLIDER)),
    (rules.stores_only_what_repeats, code("f()", shown(**{"application_vnd.jupyter.widget-view+json": "{}"}))),
    (rules.tests_what_it_does_not_compare, code("train()", printed("done"), tags=["nbval-ignore-output"])),
    (rules.tests_what_it_does_not_compare, code("f()", tags=["raises-exception"])),
    (rules.tests_what_it_does_not_compare, code("# NBVAL_SKIP\nf()")),
    (rules.describes_its_figures, code("draw()", PICTURE)),
    (rules.describes_its_figures, markdown("![](picture.png)")),
    (rules.does_not_talk_down, markdown("Clearly, the sum vanishes.")),
    (rules.has_links_that_lead_somewhere, markdown("[gone](99_gone.ipynb)")),
    (rules.has_links_that_lead_somewhere, markdown("[gone](#No-such-heading)")),
    (rules.has_links_that_lead_somewhere, markdown("<a href='gone.md'>gone</a>")),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "00_x.ipynb"
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    return path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_notebook_passes(rule, path):
    assert rule(GOOD, path) == []


@pytest.mark.parametrize(
    ("rule", "cell"), BAD_CELLS, ids=[f"{rule.__name__}-{i}" for i, (rule, _) in enumerate(BAD_CELLS)]
)
def test_a_bad_cell_is_found(rule, cell, path):
    assert len(rule(notebook(cell), path)) == 1


def test_every_rule_about_cells_has_a_bad_cell():
    others = {rules.is_small, rules.has_the_length_of_a_chapter, rules.has_normal_metadata}
    assert {rule for rule, _ in BAD_CELLS} | others == set(RULES)


def test_sources_may_be_stored_as_lines(path):
    assert rules.has_short_code(notebook(code(["x = 1\n"] * 26)), path) == ["cell 1 has 26 lines, at most 25"]


def test_a_large_file_is_found(path):
    path.write_bytes(b" " * 1_500_001)
    assert rules.is_small(GOOD, path) == ["1500001 bytes, at most 1500000"]


@pytest.mark.parametrize(
    ("name", "n", "fits"), [("01_x", 39, False), ("01_x", 40, True), ("10_x", 90, True), ("10_x", 91, False)]
)
def test_a_chapter_has_40_to_90_cells(name, n, fits):
    chapter = notebook(*[markdown("text")] * n)
    assert (rules.has_the_length_of_a_chapter(chapter, Path(f"{name}.ipynb")) == []) == fits


def test_start_page_and_solutions_may_be_short():
    assert rules.has_the_length_of_a_chapter(GOOD, Path("chapters/00_start_here.ipynb")) == []
    assert rules.has_the_length_of_a_chapter(GOOD, Path("chapters/solutions/01_policy_gradient.ipynb")) == []


def test_B49_a_kernel_of_the_authors_machine_is_found(path):
    foreign = copy.deepcopy(GOOD)
    foreign["metadata"]["kernelspec"]["name"] = "conda-env-foo-py"
    assert len(rules.has_normal_metadata(foreign, path)) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda nb: nb["metadata"].update(widgets={}),
        lambda nb: nb.update(nbformat_minor=4),
        lambda nb: nb["cells"][1]["metadata"].update(execution={"iopub.execute_input": "2026-01-01"}),
        lambda nb: nb["cells"][1].update(id=nb["cells"][0]["id"]),
        lambda nb: nb["cells"][1].pop("id"),
    ],
)
def test_metadata_that_is_not_normal_is_found(change, path):
    changed = copy.deepcopy(GOOD)
    change(changed)
    assert len(rules.has_normal_metadata(changed, path)) == 1


def test_links_into_markdown_files_use_the_code_hosts_names(tmp_path):
    (tmp_path / "ERRATA.md").write_text('# Errata\n\n## B8: the sum, cut\n\n<a id="e3"></a>\n', encoding="utf-8")
    here = tmp_path / "README.md"
    assert broken_links("[a](ERRATA.md#b8-the-sum-cut) [b](ERRATA.md#e3) [c](ERRATA.md)", here) == []
    assert broken_links("[a](ERRATA.md#b9)", here) == ["ERRATA.md#b9: no such heading"]
    assert broken_links("```\n[a](gone.md)\n```", here) == []
