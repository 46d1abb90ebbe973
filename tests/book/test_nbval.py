"""What `pytest` does with a notebook: changed numbers go red, tagged cells are run but not compared, hangs end.

The project's own pytest settings run over a folder of small notebooks, once for all tests here.
"""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from notebook_rules import ROOT

pytestmark = pytest.mark.slow
TAG = {"tags": ["nbval-ignore-output"]}


def cell(source, printed=None, metadata=None):
    outputs = [] if printed is None else [new_output("stream", name="stdout", text=printed)]
    return new_code_cell(source, outputs=outputs, execution_count=1, metadata=metadata or {})


REMEMBER_KERNEL = cell("import os, pathlib\n_ = pathlib.Path(f'kernel-{os.getpid()}').touch()")
OLD_PICTURE = new_output("display_data", {"image/png": "b2xk", "text/plain": "<Figure size 640x480 with 1 Axes>"})
DRAW = "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()"
COMPARED = {
    "kernel": REMEMBER_KERNEL,
    "same number": cell("print(f'{2 / 3:.3f}')", "0.667\n"),
    "changed number": cell("print(f'{2 / 3:.3f}')", "0.666\n"),
    "tagged, changed number": cell("print(2)", "1\n", TAG),
    "tagged, failing assert": cell("assert 1 > 2", metadata=TAG),
    "output cleared": cell("print(2)"),
    "progress bar off": cell("from tqdm import tqdm\nprint(sum(tqdm(range(4), disable=None)))", "6\n"),
    "new warning": cell("import warnings\nwarnings.warn('old')"),
    "other picture": new_code_cell(DRAW, outputs=[OLD_PICTURE], execution_count=1),
}
HANGS = [REMEMBER_KERNEL, cell("import time\ntime.sleep(60)"), cell("print(1)", "1\n")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("book")
    for name, cells in {"compared": list(COMPARED.values()), "hangs": HANGS}.items():
        nb = new_notebook(cells=cells)
        nb.metadata["kernelspec"] = {"name": "conda-env-foo-py"}  # B49: the author's kernel, unknown here
        nbformat.write(nb, folder / f"{name}.ipynb")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """Outcome of every cell, by "notebook::cell"; the hanging cell is stopped after 4 seconds."""
    return run_pytest(folder, "compared", seconds=60) | run_pytest(folder, "hangs", seconds=4)


def run_pytest(folder, name, seconds):
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *config, f"--nbval-cell-timeout={seconds}", "-rA", "--color=no"]
    # A worker of the outer run must not make this one believe that it is a worker too.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MPLBACKEND"))}
    run = subprocess.run([*command, f"{name}.ipynb"], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    found = re.findall(r"^(PASSED|FAILED) \S*\.ipynb::Cell (\d+)", run.stdout, flags=re.M)
    assert found, run.stdout + run.stderr
    return {f"{name}::{number}": outcome for outcome, number in found}


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("same number", "PASSED"),
        ("changed number", "FAILED"),
        ("tagged, changed number", "PASSED"),
        ("tagged, failing assert", "FAILED"),
        ("output cleared", "FAILED"),
        ("progress bar off", "PASSED"),
        ("new warning", "FAILED"),
        ("other picture", "PASSED"),
    ],
)
def test_B48_outcome(results, name, outcome):
    assert results[f"compared::{list(COMPARED).index(name)}"] == outcome


def test_B49_a_cell_that_hangs_is_a_failure(results):
    assert results["hangs::1"] == "FAILED"


def test_B49_no_kernel_is_left_behind(results, folder):
    kernels = [int(path.name.removeprefix("kernel-")) for path in folder.glob("kernel-*")]
    assert len(kernels) == 2
    for kernel in kernels:
        with pytest.raises(ProcessLookupError):
            os.kill(kernel, 0)
