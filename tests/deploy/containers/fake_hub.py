"""A Hugging Face hub with one model, owner/demo: `fake_hub.py FOLDER PORT`. What a download needs."""

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = Path(sys.argv[1])


class Hub(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Headers alone."""
        self.do_GET()

    def do_GET(self) -> None:
        """The list of files, or a file."""
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/demo/revision/"):
            files = [{"rfilename": file.name} for file in FOLDER.iterdir()]
            return self._send(json.dumps({"id": "owner/demo", "sha": COMMIT, "siblings": files}).encode())
        if path.startswith("/api/models/owner/demo/tree/"):
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file)}
                for file in FOLDER.iterdir()
            ]
            return self._send(json.dumps(files).encode())
        file = FOLDER / path.rpartition("/")[2]
        if path.startswith("/owner/demo/resolve/") and file.is_file():
            return self._send(file.read_bytes(), etag=_digest(file))
        return self._send(b"{}", status=404)

    def _send(self, body: bytes, *, status: int = 200, etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


ThreadingHTTPServer(("", int(sys.argv[2])), Hub).serve_forever()
