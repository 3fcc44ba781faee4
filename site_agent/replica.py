"""A site's replica of the parameters: `parameters(s) = apply(entry s, parameters(s-1))`, along the hash chain."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn

from algorithms import DeMo
from algorithms.codec import digest_arrays, unpack_update
from algorithms.flat import FlatParameters
from algorithms.layout import canonical_name
from algorithms.parts import PART_BYTES, cut, join_parts
from algorithms.step_entry import StepEntry
from algorithms.updates import AggregateUpdate, Codec, Indices
from api.errors import IsthmusError
from api.payload import decode_message, digest_json
from api.schemas import InForce, Position, Resume
from api.transfers import Source, source_of
from site_agent.fetched import Fetch

__all__ = ["Replica", "buffer_bytes", "load_buffers", "parameters_source", "save_buffers"]

Header = dict[str, Any]
FetchPart = Callable[[int, int], bytes]
"""The message of an entry's part: by its seq, and the number of the part."""

_GENESIS = "0" * 64


class Replica:
    """The parameters, and the last entry that they contain: its position and its step.

    Where regions have no rounds, the step is that of the site itself, which goes on after that entry.

    Args:
        holder: holds the parameters; what applies the steps that are read here.
        model: holds the buffers; None if they are not wanted.
        fragments: ranges of tensors that outer-step together.
        site: this site's name, to find itself among contributors.
        fetch, fetch_part: get a blob, and a part of an entry, at every local rank.
        part_bytes, indices, every: of the run's spec.
        resets: whether what the holder remembers of earlier steps is forgotten at outer steps.
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
        every: int | None = None,
        resets: bool = False,
    ) -> None:
        self.position: Position | None = None
        self.step = 0
        self.listed = 0
        """The last step whose entry lists this site, whichever of its ranks had sent that."""
        self.every = every
        """Inner steps between outer steps."""
        self.outer_round = 0
        """The last one of which an anchor was taken."""
        self.anchored: set[int] = set()
        """Fragments that have taken an anchor of the outer round after `step`."""
        self._holder = holder
        self._resets = resets
        self._model = model
        self._fragments = fragments
        self._has_buffers = False
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
        self.anchored.clear()
        self.step += 1
        self._holder.steps = self.step

    @property
    def fragment_count(self) -> int:
        """Those of the parameters, and the buffers of a model that has some."""
        return len(self._fragments) + self._has_buffers

    def is_buffers(self, fragment: int) -> bool:
        return fragment == len(self._fragments)

    def save_buffers(self) -> bytes | None:
        return None if self._model is None else save_buffers(self._model)

    def read_fragment(self, fragment: int) -> Source:
        """What is announced, and uploaded if it is asked for; of parameters that change not before that is over."""
        if self.is_buffers(fragment):
            return source_of(self.save_buffers() or b"")
        return parameters_source(self._holder, self._fragments[fragment])

    def fragment_digest(self, fragment: int) -> str:
        """SHA-256 of what `read_fragment` gives."""
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
        self._follow(header, "step")
        self.anchored.clear()
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
        self.load_buffers(header)

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
        self.outer_round = resume.outer_round
        self._go_on_with(resume.in_force)

    def load_buffers(self, start: Header) -> None:
        """Those of entry 0."""
        self._has_buffers = start["buffers"] is not None
        if start["buffers"] is not None:
            self._take_buffers(start["buffers"])

    def apply_anchor(self, header: Header, held: str | None = None) -> None:
        """Takes the new anchor of a fragment, unless the copy that this site holds, of digest `held`, is the same."""
        if header["step"] != self.step:  # a region that was taken along has no entry of that step
            self.anchored.clear()
        self._follow(header, "anchor")
        self.anchored.add(header["fragment"])
        self.outer_round = header["outer_round"]
        self._holder.steps = header["step"]
        if self.is_buffers(header["fragment"]):  # fetched in any case: each rank holds others
            self._take_buffers(header["digest"])
        elif held != header["digest"]:
            self._take(self._fragments[header["fragment"]], header["digest"])
        if self._resets and len(self.anchored) == self.fragment_count:
            self._holder.reset_momentum()

    def _take(self, tensors: range, digest: str) -> None:
        """The parameters of consecutive tensors from a blob, one after the other."""
        with self._fetch(digest) as blob:
            expected = 4 * self._holder.layout.fragment_elements(tensors)
            if blob.size != expected:
                raise IsthmusError(f"blob {digest} has {blob.size} bytes, its tensors have {expected}")
            stop = 0
            for index in tensors:
                start, stop = stop, stop + 4 * self._holder.layout.tensors[index].elements
                self._holder.write_parameters(range(index, index + 1), _floats(blob.read(start, stop)))

    def _take_buffers(self, digest: str) -> None:
        if self._model is not None:
            with self._fetch(digest) as blob:
                load_buffers(self._model, blob.whole())

    def apply_change(self, header: Header) -> None:
        """From the next step on the settings are others (rule A21)."""
        self._follow(header, "change")
        self._go_on_with(InForce(lr=header["lr"], k=header["k"], every=header["every"]))

    def _go_on_with(self, settings: InForce) -> None:
        """Whatever outer round was due after the last step is over; the learning rate is in every entry."""
        self.anchored = set(range(self.fragment_count))
        if isinstance(self._holder, DeMo):
            self._holder.settings = replace(self._holder.settings, k=settings.k)
        self.every = settings.every

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


def _floats(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def parameters_source(holder: FlatParameters, tensors: range) -> Source:
    """The float32 bytes of consecutive tensors of the layout, read when they are sent."""
    return Source(4 * holder.layout.fragment_elements(tensors), partial(holder.blocks, tensors))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that a checkpoint of the model has, too; others are made of nothing but its code."""
    kept = model.state_dict(keep_vars=True).keys()
    return {canonical_name(name): buffer for name, buffer in model.named_buffers() if name in kept}


def save_buffers(model: nn.Module) -> bytes | None:
    """All persistent buffers as safetensors, in their own dtypes; None if there is none."""
    buffers = {name: buffer.detach().cpu().contiguous().clone() for name, buffer in _buffers(model).items()}
    return save(buffers) if buffers else None


def buffer_bytes(model: nn.Module) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in _buffers(model).values())


def load_buffers(model: nn.Module, data: bytes) -> None:
    saved, own = load(data), _buffers(model)
    _require_same("buffers", saved.keys(), own.keys())
    for name, buffer in own.items():
        buffer.copy_(saved[name])


def _require_same(what: str, theirs: Collection[str], ours: Collection[str]) -> None:
    differing = sorted(set(theirs) ^ set(ours))
    if differing:
        raise IsthmusError(f"the {what} of entry 0 and of this site's model differ: {', '.join(differing[:10])}")
