"""The momentum of one rank, kept from one attempt of a site's ranks to the next (rule A10).

A stopped rank saves what it has, and what it has sent and not seen listed. The next one uses it only if it leaves no
doubt about what the log lists: what was listed must have left the momentum, and nothing else.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from algorithms import DeMo
from algorithms.updates import SparseUpdate
from site_agent.shards import pack_shard, read_shard

__all__ = ["OnItsWay", "SavedMomentum", "load_momentum", "save_momentum"]

_SENT = "/sent"
"""Beside the tensors of the model: no module or parameter has a name with a slash at its head."""


@dataclass(frozen=True)
class OnItsWay:
    """What this rank has sent to a step whose entry it has not applied, and the digest of the site's contribution."""

    step: int
    digest: str
    sent: SparseUpdate


@dataclass(frozen=True)
class SavedMomentum:
    """`seq` is the last entry that was applied when it was saved, `listed` the last step that listed this site."""

    momentum: Mapping[str, Tensor]
    seq: int
    listed: int
    on_its_way: OnItsWay | None

    def is_good(self, listed: int, enters: int, subtract: str) -> bool:
        """Whether it holds what it would hold now.

        Args:
            listed: the last step that lists this site, by the coordinator's record.
            enters: the last entry that the parameters contain from which this rank goes on; it applies the later ones.
            subtract: the setting of the optimizer.
        """
        replays_all = enters <= self.seq
        if self.on_its_way is not None and listed == self.on_its_way.step:
            return replays_all
        return listed == self.listed and (replays_all or subtract == "local")


def save_momentum(path: Path, optimizer: DeMo, saved: SavedMomentum) -> None:
    """Replaces the file as a whole."""
    way = saved.on_its_way
    facts = {
        "layout": optimizer.layout.digest,
        "owned": list(optimizer.owned),
        "seq": saved.seq,
        "listed": saved.listed,
        "on_its_way": None if way is None else [way.step, way.digest],
    }
    tensors = {name: values.detach().cpu().contiguous() for name, values in saved.momentum.items()}
    if way is not None:
        tensors[_SENT] = torch.frombuffer(bytearray(pack_shard(optimizer, way.sent)), dtype=torch.uint8)
    draft = path.with_suffix(".draft")
    save_file(tensors, draft, metadata={"isthmus": json.dumps(facts)})
    draft.replace(path)


def load_momentum(path: Path, optimizer: DeMo) -> SavedMomentum | None:
    """What was saved; None if there is no such file, or it is of another model or another number of ranks.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["isthmus"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except FileNotFoundError:
        return None
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if (facts["layout"], tuple(facts["owned"])) != (optimizer.layout.digest, optimizer.owned):
        return None
    sent, way = tensors.pop(_SENT, None), facts["on_its_way"]
    on_its_way = None
    if sent is not None:
        contribution, _ = read_shard(optimizer, sent.numpy().tobytes(), *optimizer.owned)
        on_its_way = OnItsWay(way[0], way[1], contribution)
    return SavedMomentum(tensors, facts["seq"], facts["listed"], on_its_way)
