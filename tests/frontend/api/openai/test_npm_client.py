"""OpenAI's client for Node.js, if npm is available."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hang import HANG_S

FOLDER = Path(__file__).with_name("npm")
INSTALL_TIMEOUT_S = 45


def test_npm_package_gets_what_it_expects(blocking_client, tmp_path):
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("Node.js: no npm on this machine")
    folder = shutil.copytree(FOLDER, tmp_path / "npm", ignore=shutil.ignore_patterns("node_*"))
    install = [npm, "install", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0"]
    try:
        done = subprocess.run(
            install, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"Node.js: npm installs nothing within {INSTALL_TIMEOUT_S} s")
    if done.returncode != 0:
        pytest.skip(f"Node.js: npm cannot install the package: {done.stderr[-300:]}")
    command = [node, "client.js", str(blocking_client.base_url)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.stdout, done.returncode) == ("all is well\n", 0), done.stderr
