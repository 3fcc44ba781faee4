"""The ranks of one site among themselves: bytes from all to rank 0, and from rank 0 to all.

While rank 0 is busy with the coordinator the others wait on the store, not inside a collective (rule A16): so no
collective times out, however long the wait.
"""

import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from site_agent.settings import RankPlace

__all__ = ["LocalRanks"]

_PATIENCE = timedelta(days=30)
"""Of a rank that waits for rank 0; the agent ends it if rank 0 dies."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.0002, 0.005


class LocalRanks:
    """Joins the process group of this site: NCCL where there is CUDA, gloo elsewhere; bytes always go by gloo."""

    def __init__(self, place: RankPlace) -> None:
        self.rank, self.count = place.rank, place.world_size
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", place.local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        # torchrun's own store: it outlives every rank
        self._store = TCPStore(place.master_addr, place.master_port, is_master=False, timeout=_PATIENCE)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore("isthmus/group", self._store),
            rank=self.rank,
            world_size=self.count,
        )
        self._group = dist.new_group(backend="gloo") if cuda else dist.group.WORLD
        self._turn = 0
        self._shared: list[str] = []
        """Keys in the store of what was shared since the last gather."""

    def close(self) -> None:
        dist.destroy_process_group()

    def gather(self, data: bytes) -> list[bytes]:
        """At rank 0 everybody's data in rank order; elsewhere an empty list."""
        if self.rank > 0:
            self._send(data)
            return []
        everybody = [data, *(self._receive(rank) for rank in range(1, self.count))]
        for key in self._shared:  # whoever has sent this has read all of them
            self._store.delete_key(key)
        self._shared = []
        return everybody

    def share(self, data: bytes | None) -> bytes:
        """Rank 0's data, at every rank; the others pass None."""
        if self.count == 1:
            assert data is not None
            return data
        key = f"isthmus/share/{self._turn}"
        self._turn += 1
        if self.rank == 0:
            assert data is not None
            self._store.set(key, str(len(data)))
            self._shared.append(key)
            self._broadcast(_tensor(data))
            return data
        self._wait_for(key)
        buffer = torch.empty(int(self._store.get(key)), dtype=torch.uint8)
        self._broadcast(buffer)
        return _bytes(buffer)

    def _wait_for(self, key: str) -> None:
        """Asks again and again, so that signals are seen in between: the store's own wait would not let them in."""
        pause = _LEAST_PAUSE_S
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        if buffer.numel():
            dist.broadcast(buffer, src=0, group=self._group)

    def _send(self, data: bytes) -> None:
        dist.send(torch.tensor([len(data)]), dst=0, group=self._group)
        if data:
            dist.send(_tensor(data), dst=0, group=self._group)

    def _receive(self, rank: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, src=rank, group=self._group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if buffer.numel():
            dist.recv(buffer, src=rank, group=self._group)
        return _bytes(buffer)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
