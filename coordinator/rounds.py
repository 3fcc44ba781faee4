"""A round's arithmetic: reads, validates and aggregates parts of contributions. No I/O."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from pydantic import ValidationError

from algorithms.aggregate import aggregate, outlier_halvings, without_empty_tensors
from algorithms.codec import pack_update, unpack_contribution
from algorithms.layout import ParameterLayout
from algorithms.parts import cut
from algorithms.updates import SparseUpdate
from api.errors import ConflictError, InvalidError, faults_of
from api.message import PROTOCOL_VERSION
from api.payload import decode_message
from api.schemas import ContributionHeader
from api.specs import OptimizerSpec
from coordinator.events import Norm
from coordinator.records import Sent

__all__ = ["aggregate_part", "check_header", "norms_of", "parts_of", "read_header", "read_update"]


def parts_of(layout: ParameterLayout, optimizer: OptimizerSpec, part_bytes: int) -> tuple[range, ...]:
    """The chunks of each part of a contribution."""
    return cut(layout, optimizer.k, optimizer.codec, optimizer.indices, part_bytes)


def read_header(body: bytes) -> tuple[ContributionHeader, dict[str, NDArray[Any]]]:
    """The header of a part and the packed arrays, as they are.

    Raises:
        InvalidError: malformed.
    """
    try:
        raw, arrays = decode_message("contribution", body)
        header = ContributionHeader.model_validate(raw)
    except ValidationError as error:
        faults = faults_of(error.errors())
        raise InvalidError("bad_contribution", f"contribution header: {'; '.join(faults[:5])}", errors=faults) from None
    except ValueError as error:
        raise InvalidError("bad_contribution", str(error)) from None
    return header, arrays


def read_update(
    header: ContributionHeader,
    arrays: Mapping[str, NDArray[Any]],
    layout: ParameterLayout,
    optimizer: OptimizerSpec,
    chunks: range,
) -> SparseUpdate:
    """The coefficients of a part: of these chunks, and of all of them.

    Raises:
        InvalidError: malformed; the detail names the tensor and the reason.
    """
    try:
        return unpack_contribution(
            arrays,
            layout,
            codec=optimizer.codec,
            k=optimizer.k,
            absent=header.absent,
            indices=optimizer.indices,
            chunks=chunks,
        )
    except ValueError as error:
        raise InvalidError("bad_contribution", str(error)) from None


def check_header(header: ContributionHeader, layout: ParameterLayout, optimizer: OptimizerSpec) -> None:
    """Raises:
    ConflictError: made for another layout or with other settings than the run's.
    InvalidError: of another version.
    """
    if header.version != PROTOCOL_VERSION:
        raise InvalidError("bad_contribution", f"contribution version {header.version}; this is {PROTOCOL_VERSION}")
    sent = {"layout": header.layout, "codec": header.codec, "indices": header.indices, "k": header.k}
    wanted = {"layout": layout.digest, "codec": optimizer.codec, "indices": optimizer.indices, "k": optimizer.k}
    differing = [f"{name} is {sent[name]}, the run's is {wanted[name]}" for name in sent if sent[name] != wanted[name]]
    if differing:
        raise ConflictError("settings_differ", f"contribution of {header.site}: {'; '.join(differing)}")


def norms_of(sent: Mapping[str, Sent], optimizer: OptimizerSpec) -> dict[str, Norm]:
    """The norm of each site's contribution, and how often it is halved as an outlier."""
    sites = sorted(sent)
    norms = [sent[site].norm for site in sites]
    halvings = outlier_halvings(norms) if optimizer.outliers == "halve" else [0] * len(sites)
    return dict(zip(sites, map(Norm, norms, halvings), strict=True))


def aggregate_part(
    contributions: Mapping[str, SparseUpdate | bytes],
    tokens: Mapping[str, int],
    layout: ParameterLayout,
    optimizer: OptimizerSpec,
    chunks: range,
    halvings: Mapping[str, int],
) -> dict[str, NDArray[Any]]:
    """The packed arrays of one part of the update. All mappings are by site.

    Args:
        contributions: that part of each, or the message that holds it, already validated when it arrived.
        halvings: of contributions.
    """
    sites = sorted(contributions)

    def read(one: SparseUpdate | bytes) -> SparseUpdate:
        if isinstance(one, SparseUpdate):
            return one
        return read_update(*read_header(one), layout, optimizer, chunks)

    update = aggregate(
        (read(contributions[site]) for site in sites),
        layout,
        [halvings[site] for site in sites],
        average=optimizer.average,
        tokens=[tokens[site] for site in sites],
        largest=optimizer.largest,
        chunks=chunks,
    )
    return dict(pack_update(without_empty_tensors(update, layout), layout))
