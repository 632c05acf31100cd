"""Prints what pip must install for some of Chairlift's extras, without Chairlift itself: `requirements.py engine,otel`.

`make lock` (deploy/lock.py) resolves them into the lock files that the images are made from.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of the distribution and of its extras, sorted.

    Raises: SystemExit: there is no such extra.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = set(project["dependencies"])
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            known = ", ".join(project["optional-dependencies"])
            sys.exit(f"requirements.py: there is no extra {extra!r}; EXTRA is one of {known}, or several with commas")
        lines.update(project["optional-dependencies"][extra])
    return sorted(lines)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in requirements(Path("pyproject.toml"), sys.argv[1].split(",")))
