"""Hides installed packages from a subprocess, to test what works without them."""

import importlib.metadata
import re

_HIDE = """
import sys
from importlib.machinery import PathFinder
from types import MethodType
find_spec = PathFinder.find_spec
def find_visible(_, name, path=None, target=None):
    spec = find_spec(name, path, target)
    if spec is not None and name in {modules!r}:
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        if any(place.startswith(sys.prefix) for place in places):
            return None
    return spec
PathFinder.find_spec = MethodType(find_visible, PathFinder)  # bound, as the original is
"""


def hiding(modules: set[str]) -> str:
    """Returns the source of a program's beginning that hides installed top-level modules.

    Modules of these names in folders outside the installation stay visible.
    """
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
