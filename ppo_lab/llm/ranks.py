"""Several processes as one: who this process is, which rows it works on, and numbers summed over all of them."""

import os
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among world_size others; local_rank is its number on its own machine.

    Every rank works on the same batch: it computes its own rows of it and exchanges the results, so that all that
    follows is computed from the same numbers everywhere.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def on_this_machine(self) -> int:
        """How many ranks share this machine, as the launcher says; without a launcher all of them."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def share(self, rows: Tensor) -> Tensor:
        """The rows of a batch that this rank computes: every world_size-th, from its own number on.

        All ranks get equally many; a rank that has none left gets −1, a row that counts for nothing. rows [n] int64.
        """
        missing = -len(rows) % self.world_size
        padded = torch.cat([rows, rows.new_full((missing,), -1)])
        return padded[self.rank :: self.world_size]

    def gather_rows(self, tensor: Tensor, n_rows: int) -> Tensor:
        """Put the rows that `share` has dealt out together again, on every rank: [n_own, ...] → [n_rows, ...].

        The other axes must be equal on all ranks.
        """
        if self.world_size == 1:
            return tensor[:n_rows]
        sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        parts = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(parts, sent.contiguous())
        return torch.stack(parts, 1).flatten(0, 1)[:n_rows].to(tensor.dtype)

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of a number over all ranks."""
        return int(self.reduce(torch.tensor([number], device=device), dist.ReduceOp.MAX))

    def wait(self) -> None:
        """Until every rank has come this far."""
        if self.world_size > 1:
            dist.barrier()

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum (or largest) of a tensor over all ranks, on every rank."""
        if self.world_size > 1:
            dist.all_reduce(tensor, operation)
        return tensor


def read_ranks() -> Ranks:
    """Who this process is, from RANK, LOCAL_RANK and WORLD_SIZE: what torchrun, deepspeed and others set.

    Raises ValueError for values that are no numbers or do not fit.
    """
    values = {}
    for item in fields(Ranks):
        text = os.environ.get(item.name.upper(), str(item.default))
        if not text.isdigit():
            raise ValueError(f"{item.name.upper()} must be a number, got {text!r}")
        values[item.name] = int(text)
    ranks = Ranks(**values)
    if ranks.rank >= ranks.world_size:
        raise ValueError(f"RANK must be below WORLD_SIZE, got {ranks.rank} and {ranks.world_size}")
    return ranks


def notice(text: str) -> None:
    """Tell the user something on stderr, once and not from every rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice: {text}", file=sys.stderr)
