"""A round's arithmetic: reads and validates contributions, and aggregates those that a frozen round lists. No I/O."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from pydantic import ValidationError

from algorithms.aggregate import aggregate, norm, outlier_halvings
from algorithms.codec import pack_update, unpack_contribution
from algorithms.layout import ParameterLayout
from algorithms.updates import SparseUpdate
from api.errors import ConflictError, InvalidError, faults_of
from api.payload import decode_message
from api.schemas import PROTOCOL_VERSION, ContributionHeader, OptimizerSpec
from coordinator.events import Norm

__all__ = ["aggregate_round", "check_header", "read_contribution", "read_header", "read_update"]


def read_contribution(
    body: bytes, layout: ParameterLayout, optimizer: OptimizerSpec
) -> tuple[ContributionHeader, SparseUpdate]:
    """Header and coefficients of a contribution, everything about them checked.

    Raises:
        ConflictError: made for another layout or with other settings than the run's.
        InvalidError: malformed; the detail names the tensor and the reason.
    """
    header, arrays = read_header(body, layout, optimizer)
    return header, read_update(header, arrays, layout, optimizer)


def read_header(
    body: bytes, layout: ParameterLayout, optimizer: OptimizerSpec
) -> tuple[ContributionHeader, dict[str, NDArray[Any]]]:
    """The header, checked, and the packed arrays, as they are."""
    try:
        raw, arrays = decode_message("contribution", body)
        header = ContributionHeader.model_validate(raw)
    except ValidationError as error:
        faults = faults_of(error.errors())
        raise InvalidError("bad_contribution", f"contribution header: {'; '.join(faults[:5])}", errors=faults) from None
    except ValueError as error:
        raise InvalidError("bad_contribution", str(error)) from None
    check_header(header, layout, optimizer)
    return header, arrays


def read_update(
    header: ContributionHeader, arrays: Mapping[str, NDArray[Any]], layout: ParameterLayout, optimizer: OptimizerSpec
) -> SparseUpdate:
    try:
        return unpack_contribution(
            arrays, layout, codec=optimizer.codec, k=optimizer.k, absent=header.absent, indices=optimizer.indices
        )
    except ValueError as error:
        raise InvalidError("bad_contribution", str(error)) from None


def check_header(header: ContributionHeader, layout: ParameterLayout, optimizer: OptimizerSpec) -> None:
    if header.version != PROTOCOL_VERSION:
        raise InvalidError("bad_contribution", f"contribution version {header.version}; this is {PROTOCOL_VERSION}")
    if (header.part, header.parts) != (0, 1):
        raise InvalidError("one_part", f"part {header.part} of {header.parts}: contributions have one part, number 0")
    sent = {"layout": header.layout, "codec": header.codec, "indices": header.indices, "k": header.k}
    wanted = {"layout": layout.digest, "codec": optimizer.codec, "indices": optimizer.indices, "k": optimizer.k}
    differing = [f"{name} is {sent[name]}, the run's is {wanted[name]}" for name in sent if sent[name] != wanted[name]]
    if differing:
        raise ConflictError("settings_differ", f"contribution of {header.site}: {'; '.join(differing)}")


def aggregate_round(
    contributions: Mapping[str, SparseUpdate],
    tokens: Mapping[str, int],
    layout: ParameterLayout,
    optimizer: OptimizerSpec,
) -> tuple[dict[str, NDArray[Any]], dict[str, Norm]]:
    """The update's packed arrays, and the norm of each site's contribution; both arguments are by site."""
    sites = sorted(contributions)
    sent = [contributions[site] for site in sites]
    norms = [norm(contribution) for contribution in sent]
    halvings = outlier_halvings(norms) if optimizer.outliers == "halve" else [0] * len(sites)
    update = aggregate(
        sent,
        layout,
        halvings,
        average=optimizer.average,
        tokens=[tokens[site] for site in sites],
        largest=optimizer.largest,
    )
    return dict(pack_update(update, layout)), dict(zip(sites, map(Norm, norms, halvings), strict=True))
