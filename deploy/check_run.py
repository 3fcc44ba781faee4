"""Checks the one run of a fresh coordinator from outside, with the standard library only, apart from its own code.

ISTHMUS_ADMIN_TOKEN=... python3 deploy/check_run.py URL OUTPUT      # OUTPUT: of `isthmus run start --watch --json`
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any


def get(url: str) -> Any:
    token = os.environ["ISTHMUS_ADMIN_TOKEN"]  # noqa: TID251
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy: it is this machine
    with opener.open(request, timeout=10) as response:
        return json.load(response)


def problems(base: str, output: str) -> list[str]:
    runs = get(f"{base}/v1/runs")["items"]
    if len(runs) != 1:
        return [f"expected one run, found {len(runs)}"]
    run = runs[0]
    members = {member["site"]: member["digest"] for member in run["members"]}
    regions = {member["region"] for member in run["members"]}
    reported = json.loads(output)
    checks = {
        f"status is {run['status']}: {run['reason']}": run["status"] == "succeeded",
        f"step {run['step']} of {run['spec']['steps']}": run["step"] == run["spec"]["steps"],
        f"members {members}": len(members) == 3 and len(regions) == 2,
        f"digests differ: {members}": len(set(members.values())) == 1 and None not in members.values(),
        f"outer rounds {run['outer_rounds']}, expected 2": run["outer_rounds"] == 2,
        f"isthmus reported digests_equal {reported.get('digests_equal')}": reported.get("digests_equal") is True,
    }
    sys.stdout.write(f"run {run['id']}: {run['status']}, step {run['step']}, outer rounds {run['outer_rounds']}\n")
    sys.stdout.writelines(f"  site {site}: {digest}\n" for site, digest in sorted(members.items()))
    return [problem for problem, holds in checks.items() if not holds]


if __name__ == "__main__":
    found = problems(sys.argv[1].rstrip("/"), Path(sys.argv[2]).read_text())
    sys.stderr.writelines(f"check: {problem}\n" for problem in found)
    sys.exit(bool(found))
