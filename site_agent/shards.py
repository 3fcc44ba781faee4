"""The contribution of a site from those of its ranks, each of which packs its own chunks."""

from collections.abc import Sequence
from typing import Any

from algorithms import DeMo
from algorithms.codec import pack_contribution, unpack_contribution
from algorithms.updates import SparseUpdate, merge
from api.payload import decode_message, encode_message

__all__ = ["absent_names", "pack_shard", "read_shard", "read_shards"]


def absent_names(optimizer: DeMo, contribution: SparseUpdate) -> list[str]:
    """The tensors without gradients so far, as headers name them."""
    return [optimizer.layout.tensors[index].name for index in sorted(contribution.absent)]


def pack_shard(optimizer: DeMo, contribution: SparseUpdate, **header: Any) -> bytes:
    """This rank's part of a contribution, with more fields for its header."""
    arrays = pack_contribution(contribution, optimizer.layout, optimizer.settings.codec)
    facts = {"k": optimizer.settings.k, "absent": absent_names(optimizer, contribution)}
    return encode_message("shard", {**header, **facts}, arrays)


def read_shard(optimizer: DeMo, shard: bytes, rank: int, ranks: int) -> tuple[SparseUpdate, dict[str, Any]]:
    """A rank's part, and its header. Raises ValueError if it is not what this rank owns."""
    header, arrays = decode_message("shard", shard)
    part = unpack_contribution(
        arrays,
        optimizer.layout,
        codec=optimizer.settings.codec,
        k=header["k"],
        absent=header["absent"],
        chunks=optimizer.layout.shard(rank, ranks),
    )
    return part, header


def read_shards(optimizer: DeMo, shards: Sequence[bytes]) -> tuple[SparseUpdate, list[dict[str, Any]]]:
    """The whole contribution, and the headers of its parts; shards are in rank order.

    Raises ValueError if a part is not what its rank owns, or if the ranks disagree about absent tensors.
    """
    read = [read_shard(optimizer, shard, rank, len(shards)) for rank, shard in enumerate(shards)]
    return merge([part for part, _ in read]), [header for _, header in read]
