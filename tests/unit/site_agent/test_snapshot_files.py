"""The file of a snapshot that is made while its ranks are killed."""

from site_agent.settings import Session
from site_agent.snapshots import Snapshots


def test_files_of_killed_ranks_are_removed_by_the_next_ones(tmp_path):
    attempts = [tmp_path / f"{number}-abc" for number in (1, 2)]
    for folder in attempts:
        folder.mkdir()
        (folder / "sent.jsonl").touch()
    (attempts[0] / "snapshot").write_bytes(b"half of the parameters")
    session = Session(
        coordinator="http://127.0.0.1", secret="s" * 32, run="r", attempt=2, site="a", region="w", folder=attempts[1]
    )
    Snapshots(session, None, None, None, lambda: None)
    assert [path.name for path in tmp_path.glob("*/*")] == ["sent.jsonl"] * 2
