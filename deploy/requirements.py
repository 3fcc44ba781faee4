"""Prints what Isthmus, or one of its extras, depends on: lets the Dockerfile install that before the source."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
lists = [project["optional-dependencies"][extra] for extra in sys.argv[1:]] or [project["dependencies"]]
sys.stdout.writelines(f"{requirement}\n" for requirements in lists for requirement in requirements)
