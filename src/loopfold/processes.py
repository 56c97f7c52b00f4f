"""One process, or several under `torchrun`: what they must agree on."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loopfold.errors import Mendable, OptionError
from loopfold.states import State, map_state


class ProcessLost(Mendable, RuntimeError):
    """Another process of the run has died, or cannot be reached."""


@dataclass(frozen=True)
class Processes:
    """This process among those that run the same program. Alone, by default: then nothing is sent anywhere."""

    rank: int = 0
    count: int = 1
    device: str = "cpu"  # where tensors must be to be sent

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def sum(self, t: Tensor) -> Tensor:
        """The sum of what each process has, in all of them."""
        if self.count > 1:
            t = t.to(self.device, copy=True)
            _reach(lambda: dist.all_reduce(t))
        return t

    def any(self, flag: bool) -> bool:
        """Whether it holds in any process."""
        return flag if self.count == 1 else bool(self.sum(torch.tensor(int(flag))))

    def told(self, text: str) -> str:
        """What the first process says, in all of them; the others wait for it."""
        if self.count == 1:
            return text
        said = torch.tensor([*text.encode(errors="surrogateescape")] if self.first else [], dtype=torch.int64)
        size = int(self.sum(torch.tensor(len(said))))
        whole = self.sum(said if self.first else torch.zeros(size, dtype=torch.int64))
        return bytes(whole.tolist()).decode(errors="surrogateescape")

    def gather(self, state: State) -> State:
        """The states of all processes as one, in the order of ranks along the batch."""
        return state if self.count == 1 else map_state(self._gather, state)

    def _gather(self, leaf: Tensor) -> Tensor:
        parts = [torch.empty_like(leaf) for _ in range(self.count)]
        _reach(lambda: dist.all_gather(parts, leaf.contiguous()))
        return torch.cat(parts)

    def share(self, state: State) -> State:
        """This process's part of a state that `gather` made."""
        return map_state(lambda leaf: leaf.chunk(self.count)[self.rank], state)


def _reach(exchange: Callable[[], Any]) -> None:
    try:
        exchange()
    except RuntimeError as error:  # gloo and nccl have no exception of their own
        raise ProcessLost(str(error)) from error


def join_processes(device: str) -> Processes:
    """The processes that `torchrun` has started, connected; this one alone where it has started none."""
    count = os.environ.get("WORLD_SIZE") or "1"
    if not count.isdecimal():
        raise OptionError(f"WORLD_SIZE must be the number of processes, which torchrun sets; got {count!r}: unset it.")
    if int(count) == 1:
        return Processes()
    if not dist.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # a GPU for each
        _reach(lambda: dist.init_process_group("nccl" if device.startswith("cuda") else "gloo"))
        _reach(dist.barrier)  # one that ends at once must not leave while another is still connecting
    return Processes(dist.get_rank(), dist.get_world_size(), device)
