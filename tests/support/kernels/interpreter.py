"""Speeds up Triton's interpreter, which runs the GPU kernels where there is no GPU, and fixes its order of sums."""

from functools import cache
from inspect import getmembers
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import triton.language as tl
from triton.runtime import interpreter

Matrix = npt.NDArray[Any]


def patch_language_once_per_launch() -> None:
    """Makes the interpreter patch `triton.language` once per launch instead of at every call of a device function.

    A patch holds until the launch ends, so the repetitions have no effect. They take a third of the time. Leaves
    Triton as it is if a newer version has no such function.
    """
    patch_language = getattr(interpreter, "_patch_lang", None)
    if patch_language is None or patch_language.__module__ == __name__:
        return
    run = interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules <= patched:
            return None
        patched.update(modules)
        return patch_language(function)

    def run_launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        run(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = run_launch
    _remember_builtins()
    _remember_numpy_types()


def _remember_builtins() -> None:
    """Makes a patch of `triton.language` look for the functions to patch once, instead of at every launch."""
    members = cache(lambda of: [(name, found) for name, found in getmembers(of) if tl.core.is_builtin(found)])

    def patch_members(of: Any, *rest: Any) -> None:
        for name, member in members(of):
            interpreter._patch_attr(of, name, member, *rest)

    interpreter._patch_builtin = patch_members


def _remember_numpy_types() -> None:
    """Makes the interpreter look up the NumPy type of a tensor, for which it makes a table of all types each time."""
    find = interpreter._get_np_dtype
    found: dict[str, np.dtype[Any]] = {}

    def find_once(tensor_type: Any) -> np.dtype[Any]:
        element_type = tensor_type.scalar
        if element_type.name not in found:
            found[element_type.name] = find(element_type)
        return found[element_type.name]

    interpreter._get_np_dtype = find_once


def sum_products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter add up the terms of a matrix product one by one.

    A BLAS library adds them in another order in the last columns of a matrix than in the others, where the matrix units
    of a GPU do not. So bits can be compared of rows that are in other places of a tile.
    """

    def in_order(a: Matrix, b: Matrix, dtype: npt.DTypeLike) -> Matrix:
        terms = np.ascontiguousarray(a.T, dtype)[:, :, None] * b.astype(dtype)[:, None]
        if terms[0].size == 1:  # then the terms are next to each other in memory, and `reduce` would add them in pairs
            return np.add.accumulate(terms)[-1]  # type: ignore[no-any-return]
        return np.add.reduce(terms)  # type: ignore[no-any-return]

    monkeypatch.setattr(np, "matmul", in_order)
