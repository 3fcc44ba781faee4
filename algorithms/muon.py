"""Muon for matrices and AdamW for the rest, as one torch optimizer with one learning rate."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

__all__ = ["MuonAndAdamW"]

Group = Mapping[str, Any]


class MuonAndAdamW(Optimizer):
    """torch.optim.Muon, scaled so that AdamW's learning rate suits it, for parameters of two dimensions; else AdamW.

    Args:
        groups: with `params` and `weight_decay`, and `name` if wanted; each becomes two if it has both sorts.

    Raises:
        ImportError: this torch has no Muon.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ImportError(
                f"torch {torch.__version__} has no torch.optim.Muon: install torch 2.9 or later at this site, or train "
                "with another optimizer.kind, such as adamw"
            )
        matrices, others = _split(groups, lambda parameter: parameter.ndim == 2)
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon(matrices, lr=lr, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self._parts.append(AdamW(others, lr=lr, betas=betas, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._join()

    def _join(self) -> None:
        """Groups and state belong to this optimizer and to its parts."""
        start = 0
        for part in self._parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state, start = self.param_groups[start:stop], self.state, stop

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What the closure, evaluated first, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._join()


def _split(
    groups: Sequence[Group], wanted: Callable[[Tensor], bool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups of the parameters, named or not, that are wanted, and of the others; empty ones are left out."""

    def tensor(entry: nn.Parameter | tuple[str, nn.Parameter]) -> Tensor:
        return entry[1] if isinstance(entry, tuple) else entry

    inside = [{**group, "params": [one for one in group["params"] if wanted(tensor(one))]} for group in groups]
    outside = [{**group, "params": [one for one in group["params"] if not wanted(tensor(one))]} for group in groups]
    return [group for group in inside if group["params"]], [group for group in outside if group["params"]]
