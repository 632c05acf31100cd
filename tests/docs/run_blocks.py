"""Runs blocks of Python one after the other, as the pages show them, in one interpreter.

Reads [[page, line, text], ...] from standard input; writes [[what it printed, its error or ""], ...], in which errors
name page and line.
"""

import contextlib
import io
import json
import sys
import traceback

results, names = [], {"__name__": "__main__"}
for page, line, text in json.load(sys.stdin):
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile("\n" * (line - 1) + text, page, "exec"), names)
        except BaseException:
            error = traceback.format_exc()
    results.append([printed.getvalue(), error])
json.dump(results, sys.stdout)
