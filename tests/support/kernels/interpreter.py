"""Speeds up Triton's interpreter, which runs the GPU kernels where there is no GPU."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


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
