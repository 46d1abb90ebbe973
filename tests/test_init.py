"""What `import ppo_lab` offers, and what it must not load."""

import subprocess
import sys

import pytest

import ppo_lab

LOADED = """
import sys, time
before = time.perf_counter()
import torch
torch_took = time.perf_counter() - before
import ppo_lab
took = time.perf_counter() - before
heavy = ("gymnasium", "transformers", "deepspeed", "matplotlib", "ppo_lab.control")
print([name for name in heavy if name in sys.modules])
from ppo_lab import PPONetwork
print("gymnasium" in sys.modules)
from ppo_lab import PPOAgent
print("gymnasium" in sys.modules)
print(took / torch_took)
"""


def test_the_import_loads_torch_and_nothing_heavy_until_an_agent_is_named():
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=120)
    heavy, with_network, with_agent, ratio = ran.stdout.splitlines()
    assert (heavy, with_network, with_agent) == ("[]", "False", "True")
    print(f"import ppo_lab takes {float(ratio):.2f} times as long as import torch")
    assert float(ratio) < 2


@pytest.mark.parametrize("name", ppo_lab.__all__)
def test_every_public_name_is_there_and_listed(name):
    assert getattr(ppo_lab, name).__module__.startswith("ppo_lab.")
    assert name in dir(ppo_lab)


def test_gae_is_the_function_not_the_module():
    assert callable(ppo_lab.gae)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'PPOAgents'"):
        ppo_lab.PPOAgents  # noqa: B018
