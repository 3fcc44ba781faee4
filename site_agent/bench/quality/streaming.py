"""DiLoCo (Douillard et al.), Streaming DiLoCo (Douillard et al.) and its uploads in fewer bits, by the code of runs."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.codec import pack_contribution
from algorithms.coefficients import fragment_layout, write_values
from algorithms.compression import PICKED, OuterCodec, decode, encode, left_over, wanted
from algorithms.fragment_picks import pick_largest
from algorithms.layout import ParameterLayout
from algorithms.outer import delayed_anchor, nesterov, weighted_mean
from algorithms.schedule import OuterSchedule
from site_agent.bench.quality.float32 import layout_of, tensors_of
from site_agent.bench.quality.local_steps import LocalSteps
from site_agent.bench.quality.method import Sites

__all__ = ["DiLoCo"]

Values = NDArray[np.float32]


class DiLoCo:
    """AdamW inside, Nesterov outside, fragment by fragment. Sent: what is uploaded of every fragment that is due."""

    def __init__(
        self,
        sites: Sites,
        *,
        every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        fragments: int = 1,
        stagger: bool = False,
        delay: int = 0,
        mix: float = 1.0,
        codec: OuterCodec = "fp32",
        k: int = 32,
    ) -> None:
        self.sent = 0
        self._local = LocalSteps(sites)
        self._schedule = OuterSchedule(
            every=every, fragments=fragments, steps=sites.steps, stagger=stagger, delay=delay
        )
        self._outer, self._mix = (outer_lr, outer_momentum), mix
        layout = layout_of(sites.model)
        self._layout = layout
        self._fragments = [
            _Fragment(layout, tensors, self._read(0, tensors), sites.count, codec, k)
            for tensors in layout.fragments(fragments)
        ]
        self._taken: dict[int, list[Values]] = {}
        """The copies of all sites, by fragment, of which the anchors have not been applied yet."""

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        self._local.step(batches, lr)
        step, schedule = self._local.taken, self._schedule
        if step in (schedule.applied_after(due) for due in range(step - schedule.delay, step) if schedule.due(due)):
            self._apply()
        for number in schedule.due(step):
            copies = [self._read(site, self._fragments[number].tensors) for site in range(len(self._local.replicas))]
            self.sent += self._fragments[number].outer_step(copies, *self._outer)
            self._taken[number] = copies
        if schedule.applied_after(step) == step:
            self._apply()

    def _apply(self) -> None:
        for number, copies in self._taken.items():
            fragment = self._fragments[number]
            for site, copy in enumerate(copies):
                now = self._read(site, fragment.tensors)
                self._write(site, fragment.tensors, delayed_anchor(fragment.anchor, now, copy, self._mix))
        self._taken.clear()

    def _read(self, site: int, tensors: range) -> Values:
        parameters = tensors_of(self._local.replicas[site], self._layout)
        return np.concatenate([parameters[index].detach().numpy().reshape(-1) for index in tensors])

    def _write(self, site: int, tensors: range, values: Values) -> None:
        parameters = tensors_of(self._local.replicas[site], self._layout)
        first = self._layout.offsets[tensors.start]
        for index in tensors:
            part = values[self._layout.offsets[index] - first :][: parameters[index].numel()]
            parameters[index].data.copy_(torch.from_numpy(part).view(parameters[index].shape))


class _Fragment:
    """The anchor and outer momentum of some tensors, and what is left at every site of what it wanted to send."""

    def __init__(
        self, layout: ParameterLayout, tensors: range, anchor: Values, sites: int, codec: OuterCodec, k: int
    ) -> None:
        self.tensors = tensors
        self.anchor = anchor
        self._buffer = np.zeros_like(anchor)
        self._left = [np.zeros_like(anchor) for _ in range(sites)]
        self._layout = fragment_layout(layout, tensors)
        self._codec, self._k = codec, k

    def outer_step(self, copies: Sequence[Values], lr: float, momentum: float) -> int:
        """Moves the anchor; returns how many bytes one site has sent."""
        size, read = 4 * self.anchor.size, list(copies)
        if self._codec != "fp32":
            for site, copy in enumerate(copies):
                want = wanted(self.anchor, copy, self._left[site])
                size, said = self._say(want)
                self._left[site] = left_over(want, said)
                read[site] = said
        mean = weighted_mean(read, [1] * len(read))
        if self._codec != "fp32":
            mean = self.anchor.astype(np.float64) - mean
        self.anchor, self._buffer = nesterov(self.anchor, self._buffer, mean, lr, momentum)
        return size

    def _say(self, want: Values) -> tuple[int, Values]:
        """The bytes of the encoding, and what it says."""
        assert self._codec != "fp32"
        if self._codec != "topk":
            data = encode(self._codec, want)
            return data.nbytes, decode(self._codec, data, want.size)
        picked = pick_largest(want, self._layout, self._k)
        arrays = pack_contribution(picked, self._layout, PICKED, "compact")
        said = np.empty_like(want)
        write_values(picked, self._layout, said)
        return sum(array.nbytes for array in arrays.values()), said
