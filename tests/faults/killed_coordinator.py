"""`python -m tests.faults.killed_coordinator FOLDER OPTIONS`: the coordinator, with traps (`tests.faults.traps`)."""

import sys
from pathlib import Path

import coordinator.garbage
from coordinator.__main__ import main
from tests.faults.points import IN_COORDINATOR
from tests.faults.traps import Traps

if __name__ == "__main__":
    coordinator.garbage.GRACE_S = 1
    coordinator.garbage._ABANDONED_S = 2
    Traps(Path(sys.argv[1])).install(IN_COORDINATOR)
    sys.exit(main(sys.argv[2:]))
