"""Two real ranks under torchrun gather and share bytes again and again, one of them always late."""

import sys
from pathlib import Path

from site_agent.supervisor import Exit, RankGroup
from tests.conftest import wait_until

SCRIPT = """
import hashlib

from site_agent.local_ranks import LocalRanks
from site_agent.settings import RankPlace

SIZES = [0, 1, 7, 0, 0, 4096, 100_000, 3]


def data(kind, turn, rank=0):
    seed = hashlib.sha256(repr((kind, turn, rank)).encode()).digest()
    return (seed * 3200)[: SIZES[(turn + rank) % len(SIZES)]]


ranks = LocalRanks(RankPlace())
for turn in range(100):
    if ranks.rank == 1 and turn % 20 == 0:
        sum(range(500_000))  # late
    everybody = ranks.gather(data("gather", turn, ranks.rank))
    assert everybody == ([data("gather", turn, 0), data("gather", turn, 1)] if ranks.rank == 0 else [])
    for again in range(turn % 4):  # shares in a row, without a gather between them
        mine = data("share", 4 * turn + again)
        assert ranks.share(mine if ranks.rank == 0 else None) == mine
for turn in range(50):
    mine = data("last", turn)
    assert ranks.share(mine if ranks.rank == 0 else None) == mine
if ranks.rank == 0:
    ranks.gather(b"")
    print("keys:", ranks._store.num_keys())
else:
    ranks.gather(b"")
ranks.close()
"""


def test_gather_and_share_many_times(tmp_path: Path):
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(SCRIPT)
    logs.mkdir()
    group = RankGroup([sys.executable, str(script)], 2, logs, {"OMP_NUM_THREADS": "1"})
    try:
        assert wait_until(group.poll, "the end of the ranks", seconds=100) == Exit(0)
    finally:
        group.stop(grace_s=0.0)
    (output,) = logs.glob("*/attempt_0/0/stdout.log")
    assert int(output.read_text().removeprefix("keys:")) < 40  # what was shared leaves nothing behind
