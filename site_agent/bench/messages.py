"""Bytes of complete contributions as a site sends them: safetensors header, JSON header, indices, values, scales."""

from typing import get_args

from algorithms.codec import pack_contribution
from algorithms.layout import ParameterLayout
from algorithms.updates import Codec, Indices, SparseUpdate
from api.message import PROTOCOL_VERSION
from api.payload import encode_message
from api.schemas import ContributionHeader, Position
from site_agent.bench import ours
from site_agent.bench.timing import rounded

__all__ = ["bytes_per_coefficient"]


def bytes_per_coefficient(site: ours.Site) -> dict[str, dict[str, float]]:
    """By codec and form of the indices, the message's bytes divided by the coefficients in it.

    What is sent is picked from the momentum of `site`, which stays as it is.
    """
    found: dict[str, dict[str, float]] = {}
    for codec in get_args(Codec):
        sent = site.encode({}, codec=codec, beta=1.0)
        coefficients = sum(part.values.size for part in sent.shapes.values())
        found[codec] = {
            form: rounded(len(_message(sent, site.layout, site.k, form)) / coefficients) for form in get_args(Indices)
        }
    return found


def _message(sent: SparseUpdate, layout: ParameterLayout, k: int, indices: Indices) -> bytes:
    header = ContributionHeader(
        version=PROTOCOL_VERSION,
        run="bench-0123456789",
        region="region",
        site="site",
        step=1000,
        position=Position(seq=1000, hash=layout.digest),
        layout=layout.digest,
        codec=sent.codec,
        indices=indices,
        k=k,
        tokens=8192,
        part=0,
        parts=1,
        absent=[layout.tensors[index].name for index in sorted(sent.absent)],
    )
    arrays = pack_contribution(sent, layout, sent.codec, indices)
    return encode_message("contribution", header.model_dump(mode="json"), arrays)
