"""Makes this machine's pip configuration usable inside a build: prints `--volume` arguments for podman, one a line.

    mapfile -t volumes < <(python3 deploy/containers/pip_volumes.py FOLDER)
    podman build "${volumes[@]}" ...

Whatever `pip config list` gives (files and environment) is written to FOLDER/pip.conf, which becomes /etc/pip.conf, and
every file or folder that it names (wheels, indexes, constraints, certificates) is mounted where it is. With
volumes rather than build arguments nothing of it stays in the image.
"""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path


def settings() -> dict[str, dict[str, str]]:
    """By section. What the environment says is listed as `:env:` and holds over the files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, dict[str, str]] = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        found.setdefault("global" if section == ":env:" else section, {})[key] = ast.literal_eval(value)
    return found


def local_paths(value: str) -> list[Path]:
    words = (word.removeprefix("file://") for word in re.split(r"[\s,]+", value))
    return [Path(word) for word in words if word.startswith("/") and Path(word).exists()]


def main(folder: Path) -> None:
    found = settings()
    parser = configparser.RawConfigParser()
    parser.read_dict(found)
    target = folder / "pip.conf"
    with target.open("w") as file:
        parser.write(file)
    paths = {path for section in found.values() for value in section.values() for path in local_paths(value)}
    # A simple index refers to files beside it.
    paths = {path.parent if path.name == "simple" else path for path in paths}
    volumes = [f"{target}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(paths))]
    sys.stdout.writelines(f"--volume={volume}\n" for volume in volumes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
