"""The scripts in tools/ load: they are run by hand, so nothing else would notice a name that has moved."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.mark.parametrize("name", sorted(path.stem for path in TOOLS.glob("*.py")))
def test_a_tool_loads(monkeypatch, name):
    monkeypatch.syspath_prepend(str(TOOLS))
    assert importlib.import_module(name).__doc__
    sys.modules.pop(name)
