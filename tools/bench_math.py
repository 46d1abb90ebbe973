"""Speed of the two functions that every update calls: gae against a bare loop, and ppo_loss on a minibatch.

python tools/bench_math.py
"""

import time
from collections.abc import Callable

import torch

from ppo_lab.clip import ppo_loss
from ppo_lab.gae import gae


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The shortest of several runs: the one the rest of the machine disturbed least."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def gae_ratio(n_rows: int = 1024, n_steps: int = 2048, repeats: int = 5) -> float:
    """Time of gae, flags included, in units of a loop over columns that is handed the deltas ready-made."""
    generator = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn((3, n_rows, n_steps), generator=generator)
    terminated, truncated = torch.rand((2, n_rows, n_steps), generator=generator) < 0.01
    deltas = rewards + 0.99 * next_values - values
    decay = 0.99 * 0.95 * (~(terminated | truncated)).float()

    def bare_loop() -> torch.Tensor:
        advantages, last = torch.zeros_like(deltas), torch.zeros(n_rows)
        for t in reversed(range(n_steps)):
            advantages[:, t] = last = deltas[:, t] + decay[:, t] * last
        return advantages

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        flags = {"terminated": terminated, "truncated": truncated}
        return gae(rewards, values, next_values, gamma=0.99, gae_lambda=0.95, **flags)

    bare_seconds, our_seconds = best_seconds(bare_loop, repeats), best_seconds(ours, repeats)
    ratio = our_seconds / bare_seconds
    print(f"gae [{n_rows}, {n_steps}]: {our_seconds * 1e3:.1f} ms, {ratio:.2f} × the bare loop")
    return ratio


def ppo_loss_microseconds(n: int = 256, repeats: int = 2000) -> float:
    """Forward pass and statistics of one minibatch without a mask."""
    generator = torch.Generator().manual_seed(0)
    logp, values, entropy = (torch.randn(n, generator=generator, requires_grad=True) for _ in range(3))
    old_logp, advantages, old_values, returns = torch.randn((4, n), generator=generator)
    targets = {"values": values, "old_values": old_values, "returns": returns, "entropy": entropy}
    microseconds = 1e6 * best_seconds(lambda: ppo_loss(logp, old_logp, advantages, **targets), repeats)
    print(f"ppo_loss [{n}]: {microseconds:.0f} µs")
    return microseconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    gae_ratio()
    ppo_loss_microseconds()
