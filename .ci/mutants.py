#!/usr/bin/env python3
"""Mutation testing of a sample of files: `.ci/mutants.py [FILE[:LINE] ...] [--per-file 12]`, or `make mutants`.

Changes one operator, constant, condition, return value or statement of a file at a time, runs the tests that
`mutants.toml` lists for that file (without slow ones), and reports the mutants for which no test failed (survivors).
The changes are drawn at random, with a seed. A survivor is a missing test, dead code, or a change without an effect.
After you add a test, name the survivor's line: `.ci/mutants.py engine/core/plan.py:60` tests all mutants of that line.

Each mutant is tested in a process forked from one that has imported pytest and torch, in a copy of the tree, so that
processes which a test starts run the mutant too. Exit status: 0, or 1 if too many mutants of a file survive.

mutmut and cosmic-ray were tried first. mutmut 3 leaves out decorated functions (every property, every jitted kernel)
and traces one run of all tests before it begins; cosmic-ray imports torch anew for each mutant. Neither draws a sample
or deletes statements, which finds the most.
"""

import argparse
import ast
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
CHECKED_PACKAGES = ("engine", "frontend", "kernels", "loadgen", "protos")


class Mutation(NamedTuple):
    """Replaces bytes start:end of a file."""

    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.line}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


class Result(NamedTuple):
    """Outcome of one mutant: "killed", "timeout" or "survived"."""

    mutation: Mutation
    outcome: str


_SWAPPED: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.And: "or",
    ast.Or: "and",
}
_SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGING = ("log.", "logger.", "_log.", "logging.", "warnings.")


class _Finder(ast.NodeVisitor):
    """Collects the mutations of one file. Leaves out annotations, decorators, asserts, messages and log calls, and
    keeps the attributes that `__init__` sets: any test notices that one is missing.
    """

    def __init__(self, source: bytes) -> None:
        self._source = source
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._is_init = False
        self.found: list[Mutation] = []

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _add(self, node: ast.expr | ast.stmt, new: str) -> None:
        start, end = self._span(node)
        self.found.append(Mutation(node.lineno, start, end, self._source[start:end].decode(), new))

    def _between(self, left: ast.expr, right: ast.expr, new: str) -> None:
        """Replaces the operator between two operands; what else stands there, such as parentheses, is kept."""
        start, end = self._span(left)[1], self._span(right)[0]
        text = self._source[start:end].decode()
        old = text.strip(" ()\n")
        if old and "#" not in text:
            self.found.append(Mutation(left.lineno, start, end, text, text.replace(old, new, 1)))

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between(left, right, _SWAPPED[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _SWAPPED and not _is_text(node.left) and not _is_text(node.right):
            self._between(node.left, node.right, _SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, _SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _SWAPPED_CALLS:
            self._add(node.func, _SWAPPED_CALLS[node.func.id])
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: an assertion
            self.visit(node.value)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._negate(node.guard)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool():
                self._add(node, str(not node.value))
            case int() | float():
                self._add(node, repr(node.value + 1))

    def _negate(self, condition: ast.expr) -> None:
        if not isinstance(condition, ast.UnaryOp):  # visit_UnaryOp negates `not x`
            self._add(condition, f"not ({ast.unparse(condition)})")

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
            self.generic_visit(node)
        else:
            for statement in node.body:
                self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._add(condition, "True")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add(node, "pass")
        else:
            if not (isinstance(node.value, ast.Constant) and node.value.value in (None, False)):
                self._add(node.value, "None")
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not ast.unparse(call.func).startswith(_LOGGING):
            self._add(node, "pass")
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._is_init and _sets_attribute_or_item(node):
            self._add(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        if type(node.op) in (ast.Add, ast.Sub):
            self._between(node.target, node.value, _SWAPPED[type(node.op)])
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        for default in [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]:
            self.visit(default)
        self._is_init = node.name == "__init__"
        for statement in node.body:
            self.visit(statement)
        self._is_init = False

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)


def _sets_attribute_or_item(node: ast.Assign) -> bool:
    parts = [part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return any(isinstance(part, ast.Attribute | ast.Subscript) for part in parts)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutations(source: bytes) -> list[Mutation]:
    """All mutations of a file's source that still parse, in the order of their places."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(mutation for mutation in set(finder.found) if _parses(apply(source, mutation)))


def apply(source: bytes, mutation: Mutation) -> bytes:
    """The source with one change."""
    return source[: mutation.start] + mutation.new.encode() + source[mutation.end :]


def _parses(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


class Tree:
    """A copy of the work tree in which one process at a time tests one mutant.

    Its compiled files are checked by content: two mutants written in the same second must not be confused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\n")
        kernels = (str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/**/*.nb[ic]"))  # compiled by numba
        for name in (*filter(None, listed), *kernels):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)  # with its time, which numba compares
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *CHECKED_PACKAGES],
            cwd=folder,
            check=True,
        )

    def start(self, tests: Sequence[str], log: Path) -> int:
        """Forks a process that runs the tests in this tree and stops at the first failure; returns its id."""
        process_id = os.fork()
        if process_id == 0:
            status = 70
            try:
                os.setsid()
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for number in (1, 2):
                    os.dup2(output, number)
                os.chdir(self.folder)
                os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(self.folder / "protos")])
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
                sys.dont_write_bytecode = True
                sys.path[:] = [str(self.folder), str(self.folder / "protos"), *sys.path[1:]]
                import pytest

                status = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests])
            finally:
                os._exit(int(status))
        return process_id


def _wait(process_id: int, timeout_s: float) -> int | None:
    """The exit status, or None at the time limit. Nothing of the process group is left."""
    deadline = time.monotonic() + timeout_s
    status: int | None = None
    while time.monotonic() < deadline:
        done, raw = os.waitpid(process_id, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(raw)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)
    if status is None:
        os.waitpid(process_id, 0)
    return status


def run_file(tree: Tree, path: str, tests: Sequence[str], chosen: Sequence[Mutation]) -> Iterator[Result]:
    """Tests each mutant of a file.

    Raises: RuntimeError: the tests fail without a mutant.
    """
    log = tree.folder / ".mutants.log"
    started = time.monotonic()
    if _wait(tree.start(tests, log), 1800) != 0:
        raise RuntimeError(f"{path}: its tests fail without a mutant:\n{log.read_text()[-3000:]}")
    duration_s = time.monotonic() - started
    print(f"{path}: {len(chosen)} mutants, at most {duration_s:.0f} s each, unless one hangs", flush=True)
    target = tree.folder / path
    source = target.read_bytes()
    for mutation in chosen:
        target.write_bytes(apply(source, mutation))
        status = _wait(tree.start(tests, log), 15 + 3 * duration_s)
        result = Result(mutation, "survived" if status == 0 else "timeout" if status is None else "killed")
        print(f"  {result.outcome}: {path}:{mutation}", flush=True)
        yield result
    target.write_bytes(source)


class Job(NamedTuple):
    """One file, or one line of it, and how many of its mutants to test; 0: all."""

    path: str
    line: int | None
    tests: list[str]
    per_file: int
    seed: int


def _run(job: Job) -> tuple[Job, int, list[Result]]:
    """Runs in a worker; returns the number of possible mutants and the results of those drawn, none if tests fail."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(Path(folder))
        found = mutations((tree.folder / job.path).read_bytes())
        if job.line is not None:
            found = [mutation for mutation in found if mutation.line == job.line]
        number = min(job.per_file or len(found), len(found))
        chosen = sorted(random.Random(f"{job.seed} {job.path}").sample(found, number))
        try:
            return job, len(found), list(run_file(tree, job.path, job.tests, chosen))
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            return job, len(found), []


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a file's tests kill too few mutants."""
    table: dict[str, list[str]] = tomllib.loads(TABLE.read_text())["tests"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", metavar="FILE[:LINE]", help="files listed in mutants.toml (default: all of them)"
    )
    parser.add_argument("--per-file", type=int, default=12, help="mutants per file, 0 for all (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of mutants (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time (default: 2)")
    parser.add_argument("--at-least", type=float, default=0.6, help="share that each file's tests kill (default: 0.6)")
    options = parser.parse_args(arguments)
    files = options.files or list(table)
    for path in files:
        if path.partition(":")[0] not in table:
            parser.error(f"{path}: not in {TABLE.name}")
    import pytest  # noqa: F401  imported once, before the forks
    import torch  # noqa: F401

    jobs = []
    for path, _, line in (name.partition(":") for name in files):
        jobs.append(Job(path, int(line) if line else None, table[path], 0 if line else options.per_file, options.seed))
    num_killed, num_tested, weak = 0, 0, []
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        for job, num_possible, results in pool.imap_unordered(_run, jobs):
            survived = [result.mutation for result in results if result.outcome == "survived"]
            killed = len(results) - len(survived)
            num_timeouts = sum(result.outcome == "timeout" for result in results)
            print(
                f"{job.path}: {killed} of {len(results)} killed, {num_timeouts} of them at the time limit "
                f"({num_possible} possible)"
            )
            for mutation in survived:
                print(f"  survived: {job.path}:{mutation}")
            sys.stdout.flush()
            num_killed, num_tested = num_killed + killed, num_tested + len(results)
            if not results or killed < options.at_least * len(results):
                weak.append(job.path)
    print(f"{num_killed} of {num_tested} mutants of {len(files)} files killed, {num_tested - num_killed} survived")
    if weak:
        print(f"fewer than {options.at_least:.0%} killed, or no test passed: {', '.join(weak)}", file=sys.stderr)
    return 1 if weak else 0


if __name__ == "__main__":
    sys.exit(main())
