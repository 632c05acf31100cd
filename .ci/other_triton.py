"""Installs the other end of the supported range of Triton's versions into a folder: `.ci/other_triton.py FOLDER`.

The compile check runs with both ends. Without network or wheel one line says so, and the tests with it are skipped.
"""

import subprocess
import sys

import triton

ENDS = ("3.6", "3.7")


def main(folder: str) -> None:
    """Installs it; a folder that exists is replaced."""
    other = next(end for end in ENDS if not triton.__version__.startswith(f"{end}."))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    result = subprocess.run([*pip, "--target", folder, f"triton=={other}.*"], check=False, capture_output=True)
    if result.returncode:
        print(f"No Triton {other} here: compile checks with it are skipped.")


if __name__ == "__main__":
    main(sys.argv[1])
