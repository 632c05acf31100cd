"""Hides installed packages from a subprocess, to test what works without them."""

import importlib.metadata
import re

_HIDE = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find_visible(name, path=None, target=None):
    return None if name.partition(".")[0] in {modules!r} else find_spec(name, path, target)
PathFinder.find_spec = staticmethod(find_visible)
"""


def hiding(modules: set[str]) -> str:
    """Returns the source of a program's beginning that hides top-level modules from the import system."""
    return _HIDE.format(modules=sorted(modules))


def normal(name: str) -> str:
    """Returns a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(name: str, extra: str, seen: set[str]) -> set[str]:
    """Distributions that installing `name[extra]` brings, itself included."""
    if name in seen:
        return seen
    seen.add(name)
    try:
        declared = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return seen
    for line in declared:
        requirement, _, marker = line.partition(";")
        wanted = f'extra == "{extra}"' in marker.replace("'", '"') if "extra" in marker else True
        if wanted:
            match = re.match(r"[A-Za-z0-9._-]+", requirement)
            assert match is not None
            requirements(normal(match.group()), "", seen)
    return seen


def hidden_modules(allowed: set[str]) -> set[str]:
    """Returns the top-level modules of all installed distributions but the allowed ones."""
    modules = importlib.metadata.packages_distributions()
    return {module for module, owners in modules.items() if not {normal(owner) for owner in owners} & allowed} - {
        "_distutils_hack"
    }
