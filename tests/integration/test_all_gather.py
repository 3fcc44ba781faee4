"""Four real processes with gloo, once for all tests: DeMo without a coordinator, and how it fails."""

import json
from collections.abc import Callable
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from algorithms import DeMo, StepEntry
from algorithms.updates import SparseUpdate
from site_agent import AllGather
from site_agent.bench.quality.demo_sites import Round

pytestmark = pytest.mark.timeout(900)  # for a machine that has much else to do

RANKS = 4
STEPS = 6
POISONED = {2: (1,), 4: (0, 1, 2, 3)}
"""Step -> the sites whose gradients are not finite in it."""


class Net(nn.Module):
    """Chunks that are transformed, chunks that are not, and a tensor that gets no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(70, 130), nn.Tanh(), nn.Linear(130, 9))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.layers(batch) - batch[:, :9].roll(1, dims=1)).square().mean()


def batch_of(site: int, step: int) -> Tensor:
    return torch.randn(16, 70, generator=torch.Generator().manual_seed(100 * step + site))


def demo(model: nn.Module, exchange: Callable[[DeMo, SparseUpdate | None], StepEntry], **options: Any) -> DeMo:
    return DeMo(model.named_parameters(), lr=2e-3, k=16, weight_decay=0.1, exchange=exchange, **options)


def train_site(site: int, model: nn.Module, optimizer: DeMo, poisoned: dict[int, tuple[int, ...]]) -> list[str]:
    """The digests of the parameters after every step."""
    digests = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(site, step)).backward()
        if site in poisoned.get(step, ()):
            next(p.grad for p in model.parameters() if p.grad is not None)[0] = torch.nan
        optimizer.step()
        digests.append(optimizer.parameters_digest())
    return digests


# --- what each rank does ----------------------------------------------------------------------------------------------


def paper(rank: int, folder: Path) -> Any:
    """Every rank is a site; nobody averages gradients."""
    model = Net(0)
    return train_site(rank, model, demo(model, AllGather()), {})


def abstaining(rank: int, folder: Path) -> Any:
    model = Net(0)
    optimizer = demo(model, AllGather(), codec="int8")
    return train_site(rank, model, optimizer, POISONED), optimizer.skipped_steps


def two_sites_of_two(rank: int, folder: Path) -> Any:
    """Each site averages its gradients by DDP and shards its momentum; the data of site s are those of rank s."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain = Net(0)
    model = DistributedDataParallel(plain, process_group=groups[rank // 2], find_unused_parameters=True)
    optimizer = demo(plain, AllGather(ranks_per_site=2), codec="int8", owned=(rank % 2, 2))
    return train_site(rank // 2, model, optimizer, {})


def one_site(ranks: int, rank: int, folder: Path) -> Any:
    """One site of so many ranks, which see the same batch; everybody's part of every contribution goes to a file.

    Beside them a site of one rank applies the same entries; its digests are the second answer.
    """
    group = dist.new_group(list(range(ranks)))
    if rank >= ranks:
        return None
    plain = Net(0)
    gather = AllGather(group, ranks_per_site=ranks)
    parts: dict[str, np.ndarray] = {}
    alone = demo(Net(0), gather, codec="int8")
    applied: list[str] = []

    def record(optimizer: DeMo, sent: SparseUpdate | None) -> StepEntry:
        assert sent is not None
        for (rows, cols), part in sent.shapes.items():
            for field in ("chunks", "indices", "values", "scales"):
                parts[f"{optimizer.steps} {rows}x{cols} {field}"] = getattr(part, field)
        entry = gather(optimizer, sent)
        alone.apply(entry)
        applied.append(alone.parameters_digest())
        return entry

    optimizer = demo(plain, record, codec="int8", owned=(rank, ranks))
    model = DistributedDataParallel(plain, process_group=group, find_unused_parameters=True) if ranks > 1 else plain
    digests = train_site(0, model, optimizer, {})
    np.savez(folder / f"parts-{ranks}-{rank}.npz", **parts)
    return [digests, applied]


def averaged(rank: int, folder: Path) -> Any:
    """DDP over the very group: the momenta of all sites become one."""
    model = DistributedDataParallel(Net(0), find_unused_parameters=True)
    return error_of(lambda: train_site(rank, model, demo(model, AllGather()), {}))


def averaged_under_no_sync(rank: int, folder: Path) -> Any:
    model = DistributedDataParallel(Net(0), find_unused_parameters=True)
    with model.no_sync():
        return train_site(rank, model, demo(model, AllGather()), {})


def nothing_to_send(rank: int, folder: Path) -> Any:
    """Gradients of zero are equal, and no mistake."""
    model = Net(0)
    optimizer = demo(model, AllGather())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = optimizer.parameters_digest()
    optimizer.step()
    return optimizer.parameters_digest() == before


def mistakes(rank: int, folder: Path) -> Any:
    other_start = Net(rank // 2)
    other_layout = nn.Linear(70, 64 + rank // 3)
    sharded = Net(0)
    return [
        error_of(lambda: train_site(rank, other_start, demo(other_start, AllGather()), {})),
        error_of(lambda: AllGather()(demo(other_layout, AllGather()), None)),
        error_of(lambda: train_site(rank, sharded, demo(sharded, AllGather(ranks_per_site=2)), {})),
        error_of(lambda: AllGather(ranks_per_site=3)),
        error_of(lambda: AllGather(ranks_per_site=0)),
    ]


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "no error"


SCENARIOS: dict[str, Callable[[int, Path], Any]] = {
    "paper": paper,
    "abstaining": abstaining,
    "two sites of two": two_sites_of_two,
    "one site of 1": partial(one_site, 1),
    "one site of 2": partial(one_site, 2),
    "one site of 4": partial(one_site, 4),
    "averaged": averaged,
    "no_sync": averaged_under_no_sync,
    "nothing": nothing_to_send,
    "mistakes": mistakes,
}


def play(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {name: scenario(rank, folder) for name, scenario in SCENARIOS.items()}
    (folder / f"results-{rank}").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# --- what must come of it ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    set_forkserver_preload([__name__, "torch._dynamo"])  # which DDP imports: once, not at every rank
    start_processes(play, (folder,), RANKS, start_method="forkserver")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[Any]]:
    """Scenario -> what each rank returned."""
    everybody = [json.loads((folder / f"results-{rank}").read_text()) for rank in range(RANKS)]
    return {name: [results[name] for results in everybody] for name in SCENARIOS}


def simulated(sites: int, poisoned: dict[int, tuple[int, ...]], **options: Any) -> list[str]:
    """The digests when the sites are threads of this process, with no process group."""
    one_round, digests = Round(sites), [[""] for _ in range(sites)]
    models = [Net(0) for _ in range(sites)]

    def train(site: int) -> None:
        optimizer = demo(models[site], partial(one_round, site), **options)
        digests[site] = train_site(site, models[site], optimizer, poisoned)

    threads = [Thread(target=train, args=(site,)) for site in range(sites)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(other == digests[0] for other in digests)
    return digests[0]


def test_four_ranks_are_four_sites(results: dict[str, list[Any]]) -> None:
    assert results["paper"] == [simulated(4, {})] * RANKS
    assert len(set(results["paper"][0])) == STEPS


def test_a_rank_that_abstains_applies_the_entry_of_the_others(results: dict[str, list[Any]]) -> None:
    expected = simulated(4, POISONED, codec="int8")
    assert results["abstaining"] == [[expected, 2 if rank == 1 else 1] for rank in range(RANKS)]
    assert expected[4] == expected[3]
    assert len(set(expected)) == STEPS - 1


def test_sites_of_several_ranks(results: dict[str, list[Any]]) -> None:
    assert len({tuple(digests) for digests in results["two sites of two"]}) == 1
    assert len(set(results["two sites of two"][0])) == STEPS


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_one_site_share_the_momentum(results: dict[str, list[Any]], folder: Path, ranks: int) -> None:
    answers = results[f"one site of {ranks}"][:ranks]
    digests = answers[0][0]
    assert len(set(digests)) == STEPS
    assert all(answer == [digests, digests] for answer in answers)
    alone = np.load(folder / "parts-1-0.npz")
    shards = [np.load(folder / f"parts-{ranks}-{rank}.npz") for rank in range(ranks)]
    for name in [name for name in alone if name.startswith("0 ") and name.endswith("chunks")]:
        shape = name.removesuffix("chunks")
        joined = {
            field: np.concatenate([shard[shape + field] for shard in shards if shape + field in shard])
            for field in ("chunks", "indices", "values", "scales")
        }
        np.testing.assert_array_equal(joined["chunks"], alone[name])
        values, expected = (dense(arrays) for arrays in (joined, {field: alone[shape + field] for field in joined}))
        scale = np.abs(expected).max(axis=1, keepdims=True)
        # one step of an 8-bit value; nearly equal coefficients may change places at the end of the picks
        assert np.mean(np.abs(values - expected) <= scale / 100) > 0.999
    assert sum(sum(shard[name].size for name in shard if name.endswith("values")) for shard in shards) == sum(
        alone[name].size for name in alone if name.endswith("values")
    )


def dense(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Values (m, 4096) of coefficients (m, k)."""
    values = np.zeros((len(arrays["chunks"]), 4096))
    np.put_along_axis(values, arrays["indices"].astype(np.int64), arrays["values"] * arrays["scales"][:, None], axis=1)
    return values


def test_averaged_gradients_are_an_error_that_says_what_to_do(results: dict[str, list[Any]]) -> None:
    for message in results["averaged"]:
        assert "the gradients of all 4 sites are equal" in message
        assert "no_sync()" in message
        assert "ranks_per_site" in message
    assert results["no_sync"] == results["paper"]
    assert results["nothing"] == [True] * RANKS


def test_mistakes_are_named(results: dict[str, list[Any]]) -> None:
    for rank, (start, layout, owned, three, zero) in enumerate(results["mistakes"]):
        assert start == "parameters of ranks [2, 3] differ from those of rank 0: all must start equal"
        assert layout == "layouts of ranks [3] differ from those of rank 0: all must start equal"
        assert owned == f"with 2 ranks per site this rank needs owned=({rank % 2}, 2)"
        assert three == "4 ranks are not a whole number of sites of 3 ranks"
        assert zero == "4 ranks are not a whole number of sites of 0 ranks"
