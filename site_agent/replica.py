"""A site's replica of the parameters: `parameters(s) = apply(entry s, parameters(s-1))`, along the hash chain."""

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from algorithms import DeMo
from algorithms.codec import digest_arrays, unpack_update
from algorithms.flat import FlatParameters
from algorithms.outer import delayed_anchor, shifted
from algorithms.parts import PART_BYTES, cut, join_parts
from algorithms.schedule import OuterSchedule
from algorithms.step_entry import StepEntry
from algorithms.updates import AggregateUpdate, Codec, Indices
from api.errors import IsthmusError
from api.payload import decode_message, digest_json
from api.schemas import Position, Resume
from api.specs import InForce
from api.transfers import Source, source_of
from site_agent.buffers import load_buffers, save_buffers
from site_agent.fetched import Fetch, Fetched
from site_agent.progress import Progress

__all__ = ["Anchor", "Replica", "parameters_source"]

Header = dict[str, Any]
Values = NDArray[np.float32]
FetchPart = Callable[[int, int], bytes]
"""The message of an entry's part: by its seq, and the number of the part."""

_GENESIS = "0" * 64


class Anchor(NamedTuple):
    """Of a fragment, by the outer round that made it; 0: entry 0."""

    outer_round: int
    values: Values


class Replica:
    """The parameters, and the last entry that they contain: its position and its step.

    Where regions have no rounds, the step is that of the site itself, which goes on after that entry.

    Args:
        holder: holds the parameters; what applies the steps that are read here.
        model: holds the buffers; None if they are not wanted.
        fragments: ranges of tensors that outer-step together.
        site: this site's name, to find itself among contributors.
        fetch, fetch_part: get a blob, and a part of an entry, at every local rank.
        part_bytes, indices: of the run's spec.
        schedule, mix: of its outer steps, if there are any.
        resets: whether what the holder remembers of earlier steps is forgotten at outer steps.
        keeps_anchors: whether the last anchor of every fragment is kept, in `anchors`.
    """

    def __init__(
        self,
        holder: FlatParameters,
        model: nn.Module | None,
        fragments: tuple[range, ...],
        site: str,
        fetch: Fetch,
        fetch_part: FetchPart,
        part_bytes: int = PART_BYTES,
        *,
        indices: Indices = "packed",
        schedule: OuterSchedule | None = None,
        mix: float = 1.0,
        resets: bool = False,
        keeps_anchors: bool = False,
    ) -> None:
        self.position: Position | None = None
        self.step = 0
        self.listed = 0
        """The last step whose entry lists this site, whichever of its ranks had sent that."""
        self.lr: float | None = None
        """The peak learning rate, since it was changed; that of a step in the log is in its entry."""
        self.outer = Progress(schedule)
        self.apart = False
        """Whether the last anchor was made without this region, which has kept what it had."""
        self.anchors: dict[int, Anchor] = {}
        self._taken: dict[int, bytes] = {}
        """Copies of the fragments whose anchors are applied some steps later."""
        self._mix = mix
        self._keeps_anchors = keeps_anchors
        self._holder = holder
        self._resets = resets
        self._model = model
        self._fragments = fragments
        self._site = site
        self._fetch = fetch
        self._fetch_part = fetch_part
        self._part_bytes = part_bytes
        self._indices = indices

    @property
    def next_seq(self) -> int:
        return 0 if self.position is None else self.position.seq + 1

    def advance(self) -> None:
        """A step of this site's own, which is in no log."""
        self.step += 1
        self._holder.steps = self.step

    def begin_outer_round(self) -> None:
        """If one follows the last step. Copies are kept of what is trained on until its anchors are applied."""
        if not self.outer.begins(self.step):
            return
        self.outer.begin(self.step)
        self._taken.clear()
        if self.outer.ends > self.step:
            kept = (
                fragment for fragment in self.outer.missing if self._model is not None or not self.is_buffers(fragment)
            )
            self._taken = {fragment: b"".join(self.read_fragment(fragment).blocks(0)) for fragment in kept}

    def is_buffers(self, fragment: int) -> bool:
        return fragment == len(self._fragments)

    def save_buffers(self) -> bytes | None:
        return None if self._model is None else save_buffers(self._model)

    def read_fragment(self, fragment: int) -> Source:
        """The copy that waits for its anchor; or what the fragment is now, to be read before that changes."""
        if fragment in self._taken:
            return source_of(self._taken[fragment])
        if self.is_buffers(fragment):
            return source_of(self.save_buffers() or b"")
        return parameters_source(self._holder, self._fragments[fragment])

    def fragment_digest(self, fragment: int) -> str:
        """SHA-256 of what `read_fragment` gives."""
        if fragment in self._taken:
            return hashlib.sha256(self._taken[fragment]).hexdigest()
        if self.is_buffers(fragment):
            return hashlib.sha256(self.save_buffers() or b"").hexdigest()
        return self._holder.parameters_digest(self._fragments[fragment])

    def parts(self, k: int, codec: Codec) -> tuple[range, ...]:
        """The chunks of each part of contributions and updates."""
        return cut(self._holder.layout, k, codec, self._indices, self._part_bytes)

    def read_step(self, message: bytes, sent: str = "") -> StepEntry:
        """The entry of a step, for the optimizer to apply; the replica's position moves past it.

        Args:
            message: of the entry's part 0; the others are fetched.
            sent: digest of what this site has contributed to the step; it is listed only if the entry names that.

        Raises:
            IsthmusError: it does not follow the last entry, or its arrays are not those that the header names.
        """
        header, arrays = decode_message("entry", message)
        self.begin_outer_round()
        self._follow(header, "step")
        self._holder.steps = header["step"] - 1
        if self._site in {line["site"] for line in header["contributors"]}:
            self.listed = max(self.listed, header["step"])
        return StepEntry(
            update=self._read_update(header, arrays),
            lr=tuple(header["lr"]),
            decay=tuple(header["decay"]),
            listed=(self._site, sent) in {(line["site"], line["digest"]) for line in header["contributors"]},
        )

    def _read_update(self, header: Header, first: dict[str, NDArray[Any]]) -> AggregateUpdate | None:
        """Joined from all parts; None if nobody has contributed. `first`: the arrays of part 0."""
        digests = header["parts"]
        if not digests:
            _require_arrays(header, first, None)
            return None
        ranges = self.parts(header["k"], header["codec"])
        if len(digests) != len(ranges):
            raise IsthmusError(f"entry {header['seq']} has {len(digests)} parts, by the run's settings {len(ranges)}")
        updates = []
        for part, (digest, chunks) in enumerate(zip(digests, ranges, strict=True)):
            arrays = first if part == 0 else self._read_part(header, part)
            _require_arrays(header, arrays, digest)
            updates.append(unpack_update(arrays, self._holder.layout, chunks))
        return join_parts(updates, self._holder.layout, ranges)

    def _read_part(self, header: Header, part: int) -> dict[str, NDArray[Any]]:
        other, arrays = decode_message("entry", self._fetch_part(header["seq"], part))
        if other != header:
            raise IsthmusError(f"part {part} of entry {header['seq']} has another header than part 0")
        return arrays

    def apply_start(self, header: Header) -> None:
        """Entry 0: everybody begins with the same parameters and buffers, the donor too (rule A3)."""
        self._follow(header, "start")
        if header["layout"] != self._holder.layout.digest:
            raise IsthmusError("entry 0 belongs to a model of another layout than this site's")
        self._take(range(len(self._holder.layout.tensors)), header["parameters"])
        self._keep_anchors(0, range(len(self._fragments)))
        self.load_buffers(header)

    def _keep_anchors(self, outer_round: int, fragments: Collection[int]) -> None:
        """The fragments are anchors now."""
        for fragment in fragments if self._keeps_anchors else ():
            values = self._holder.read_parameters(self._fragments[fragment])
            self.anchors[fragment] = Anchor(outer_round, values)

    def resume(self, resume: Resume) -> None:
        """Enters the log behind an outer round, or at a snapshot: the anchors are all parameters.

        Buffers stay what they are, if none are named.
        """
        ranges = self._fragments or (range(len(self._holder.layout.tensors)),)
        for tensors, digest in zip(ranges, resume.anchors, strict=True):
            self._take(tensors, digest)
        if resume.buffers is not None:
            self._take_buffers(resume.buffers)
        self.position = resume.position
        self._holder.steps = self.step = resume.step
        self._taken.clear()
        self.apart = False
        self.outer.enter(resume.outer_round, resume.outer_step, resume.in_force.every)
        self._keep_anchors(resume.outer_round, range(len(self._fragments)))
        self._go_on_with(resume.in_force)

    def load_buffers(self, start: Header) -> None:
        """Those of entry 0."""
        self.outer.has_buffers = start["buffers"] is not None
        if start["buffers"] is not None:
            self._take_buffers(start["buffers"])

    def apply_anchor(self, header: Header, held: str | None = None) -> None:
        """Takes the new anchor of a fragment, unless the copy that this site holds, of digest `held`, is the same.

        What was done since the copy was taken is kept on top of it, as far as the run's spec says; nothing, where there
        is no copy. A region that was not in the mean moves as the anchor does, or takes it as it is, as the entry says.
        Buffers become those of the anchor in any case: each rank has others.
        """
        self.begin_outer_round()
        self._follow(header, "anchor")
        fragment = header["fragment"]
        if header["taken_after"] != self.outer.step:
            self._taken.clear()
        self.outer.take(header)
        self._holder.steps = header["step"]
        taken = self._taken.pop(fragment, None)
        if self.is_buffers(fragment):  # fetched in any case: each rank holds others
            self._take_buffers(header["digest"])
        elif header.get("before") is not None:
            self._shift(fragment, header["digest"], header["before"])
        elif taken is not None and "before" not in header:
            blob = nullcontext(_held(taken)) if held == header["digest"] else self._fetch(header["digest"])
            self._take_late(fragment, header["digest"], blob, taken)
        else:
            if held != header["digest"] or taken is not None:
                self._take(self._fragments[fragment], header["digest"])
            self._keep_anchors(header["outer_round"], [fragment])
        if not self.is_buffers(fragment):
            self.apart = header.get("before") is not None
        if self._resets and not self.outer.missing:
            self._holder.reset_momentum()

    def _take(self, tensors: range, digest: str) -> None:
        """The parameters of consecutive tensors from a blob, one after the other."""
        with self._fetch(digest) as blob:
            for one, _, values in self._tensors_in(blob, digest, tensors):
                self._holder.write_parameters(one, values)

    def _take_late(self, fragment: int, digest: str, anchor: AbstractContextManager[Fetched], taken: bytes) -> None:
        """The anchor of a copy that was taken some steps ago."""
        kept = []
        with anchor as blob:
            for one, place, values in self._tensors_in(blob, digest, self._fragments[fragment]):
                now = self._holder.read_parameters(one)
                self._holder.write_parameters(one, delayed_anchor(values, now, _floats(taken[place]), self._mix))
                if self._keeps_anchors:
                    kept.append(values)
        if self._keeps_anchors:
            self.anchors[fragment] = Anchor(self.outer.number, np.concatenate(kept))

    def _shift(self, fragment: int, digest: str, before: str) -> None:
        """By the difference of two anchors; the one before may be among the parameters of entry 0."""
        tensors, layout, kept = self._fragments[fragment], self._holder.layout, []
        with self._fetch(digest) as blob, self._fetch(before) as old:
            starts = {4 * layout.parameter_count: 4 * layout.offsets[tensors.start], blob.size: 0}
            if old.size not in starts:
                raise IsthmusError(f"blob {before} has {old.size} bytes, the anchor after it has {blob.size}")
            for one, place, values in self._tensors_in(blob, digest, tensors):
                start = starts[old.size]
                was = _floats(old.read(start + place.start, start + place.stop))
                self._holder.write_parameters(one, shifted(self._holder.read_parameters(one), values, was))
                if self._keeps_anchors:
                    kept.append(values)
        if self._keeps_anchors:
            self.anchors[fragment] = Anchor(self.outer.number, np.concatenate(kept))

    def _tensors_in(self, blob: Fetched, digest: str, tensors: range) -> Iterator[tuple[range, slice, Values]]:
        """Each of consecutive tensors: as a range, its place among the bytes of a blob, and its values."""
        expected = 4 * self._holder.layout.fragment_elements(tensors)
        if blob.size != expected:
            raise IsthmusError(f"blob {digest} has {blob.size} bytes, its tensors have {expected}")
        stop = 0
        for index in tensors:
            start, stop = stop, stop + 4 * self._holder.layout.tensors[index].elements
            yield range(index, index + 1), slice(start, stop), _floats(blob.read(start, stop))

    def _take_buffers(self, digest: str) -> None:
        if self._model is not None:
            with self._fetch(digest) as blob:
                load_buffers(self._model, blob.whole())

    def apply_change(self, header: Header) -> None:
        """From the next step on the settings are others (rule A21)."""
        self.begin_outer_round()
        self._follow(header, "change")
        self.outer.change(header["from_step"], header["every"])
        self._go_on_with(InForce(lr=header["lr"], k=header["k"], every=header["every"]))

    def _go_on_with(self, settings: InForce) -> None:
        if isinstance(self._holder, DeMo):
            self._holder.settings = replace(self._holder.settings, k=settings.k)
        self.lr = settings.lr

    def _follow(self, header: Header, *kinds: str) -> None:
        expected = _GENESIS if self.position is None else self.position.hash
        if (header["seq"], header["previous"]) != (self.next_seq, expected):
            last = "the empty log" if self.position is None else f"entry {self.position.seq}"
            raise IsthmusError(f"entry {header['seq']} does not follow {last} of this site: its log is another one")
        if header["kind"] not in kinds:
            raise IsthmusError(f"entry {header['seq']} is of kind {header['kind']}, not {' or '.join(kinds)}")
        self.position = Position(seq=header["seq"], hash=digest_json(header))
        self.step = header["step"]


def _require_arrays(header: Header, arrays: dict[str, NDArray[Any]], digest: str | None) -> None:
    if digest != (digest_arrays(arrays) if arrays else None):
        raise IsthmusError(f"entry {header['seq']} arrived with other arrays than its header names")


def _held(data: bytes) -> Fetched:
    """A blob that need not be fetched."""
    return Fetched(len(data), lambda start, stop: data[start:stop])


def _floats(data: bytes) -> Values:
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def parameters_source(holder: FlatParameters, tensors: range) -> Source:
    """The float32 bytes of consecutive tensors of the layout, read when they are sent."""
    return Source(4 * holder.layout.fragment_elements(tensors), partial(holder.blocks, tensors))
