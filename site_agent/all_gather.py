"""DeMo inside one process group, without a coordinator: every rank gathers what all have picked (the paper's way)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from algorithms.demo import DeMo
from algorithms.step_entry import StepEntry
from algorithms.updates import SparseUpdate
from site_agent.shards import pack_shard, read_shards

__all__ = ["AllGather"]

_ABSTAINS = b""


class AllGather:
    """The `exchange` of a DeMo whose sites are ranks of one process group: `DeMo(..., exchange=AllGather())`.

    A site is `ranks_per_site` consecutive ranks, which average their gradients among themselves and share the momentum
    by `owned=(rank % ranks_per_site, ranks_per_site)`. Gradients of different sites must not be averaged. All ranks
    make the same entry, of the sites of which no rank abstains; the optimizers start with equal parameters, and have
    equal settings and rates.

    Raises ValueError if the group is not a whole number of sites.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, ranks_per_site: int = 1) -> None:
        ranks = dist.get_world_size(group)
        if ranks_per_site < 1 or ranks % ranks_per_site:
            raise ValueError(f"{ranks} ranks are not a whole number of sites of {ranks_per_site} ranks")
        self._group = group
        self._ranks_per_site = ranks_per_site
        self._site, self._rank = divmod(dist.get_rank(group), ranks_per_site)
        has_cpu = "cpu:" in dist.get_backend_config(group)
        self._device = torch.device("cpu") if has_cpu else torch.device("cuda", torch.cuda.current_device())
        self._replicas_checked = False
        self._gradients_checked = False

    def __call__(self, optimizer: DeMo, contribution: SparseUpdate | None) -> StepEntry:
        """The entry of a step to which every rank contributes, or abstains with None.

        Raises ValueError if the optimizers differ between ranks, or gradients have been averaged over the sites.
        """
        if optimizer.owned != (self._rank, self._ranks_per_site):
            place = (self._rank, self._ranks_per_site)
            raise ValueError(f"with {self._ranks_per_site} ranks per site this rank needs owned={place}")
        if not self._replicas_checked:
            self._check_replicas(optimizer)
        shards = self._gather(_ABSTAINS if contribution is None else pack_shard(optimizer, contribution))
        starts = range(0, len(shards), self._ranks_per_site)
        sites = [shards[start : start + self._ranks_per_site] for start in starts]
        listed = [site for site in sites if _ABSTAINS not in site]
        contributions = [read_shards(optimizer, site)[0] for site in listed]
        if not self._gradients_checked:
            self._check_gradients(listed, contributions)
        return optimizer.entry(contributions, listed=_ABSTAINS not in sites[self._site])

    def _check_replicas(self, optimizer: DeMo) -> None:
        """Whether all ranks have one layout and equal parameters to begin with."""
        mine = (optimizer.layout.digest, optimizer.parameters_digest())
        everybody = [digests.decode().split() for digests in self._gather(" ".join(mine).encode())]
        for what, digests in zip(("layouts", "parameters"), zip(*everybody, strict=True), strict=True):
            if len(set(digests)) > 1:
                differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
                raise ValueError(f"{what} of ranks {differing} differ from those of rank 0: all must start equal")
        self._replicas_checked = True

    def _check_gradients(self, sites: Sequence[Sequence[bytes]], contributions: Sequence[SparseUpdate]) -> None:
        """Whether sites contribute different things, which they do unless somebody has averaged the gradients."""
        if len(sites) < 2 or all(not part.scales.any() for part in contributions[0].shapes.values()):
            return
        if all(site == sites[0] for site in sites):
            raise ValueError(
                f"the gradients of all {len(sites)} sites are equal: have they been averaged already? Let each site "
                "keep its own: do not wrap the model in DistributedDataParallel over this group, or run backward under "
                "its no_sync(). If all ranks are one site, say so by ranks_per_site"
            )
        self._gradients_checked = True

    def _gather(self, data: bytes) -> list[bytes]:
        """Everybody's data in rank order: sizes first, then bytes padded to the largest."""
        size = torch.tensor([len(data)], device=self._device)
        sizes = size.new_empty(dist.get_world_size(self._group), 1)
        dist.all_gather(list(sizes.unbind()), size, self._group)
        lengths = sizes.view(-1).tolist()
        if not any(lengths):
            return [b""] * len(lengths)
        padded = torch.frombuffer(bytearray(data.ljust(max(lengths), b"\0")), dtype=torch.uint8).to(self._device)
        everybody = padded.new_empty(len(lengths), len(padded))
        dist.all_gather(list(everybody.unbind()), padded, self._group)
        rows = everybody.cpu().numpy()
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
