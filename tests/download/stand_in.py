"""A server that speaks as the Hugging Face Hub and as Cloud Storage do, and fails as it is told to.

`python -m tests.download.stand_in FOLDER PORT` serves FOLDER/hub/OWNER/NAME and FOLDER/gs/BUCKET. What is in a folder
named `private` is only for those who know the token; of one named `gated` others see the list. A path may begin with
/mirror. POST /faults has a list of faults, each with a pattern of the requests that it is for, their ranges included,
and how many of them; GET /log has the requests so far.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import google_crc32c

TOKEN = "hf_of_a_test"
LARGE = 100_000  # bytes, from which on the hub has a file elsewhere
COMMIT = "c0ffee" + "0" * 34


class StandIn(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, root: Path, port: int):
        super().__init__(("127.0.0.1", port), Handler)
        self.root = root
        self.lock = threading.Lock()
        self.faults: list[dict] = []
        self.log: list[dict] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are a part of the tests."""

    def fault(self, path: str, span: str | None) -> dict | None:
        """The first that is meant for a request, which it counts."""
        with self.lock:
            for fault in self.faults:
                if fault.get("times", 1) and re.search(fault["match"], f"{path} {span or ''}"):
                    fault["times"] = fault.get("times", 1) - 1
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        self.server.faults = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/log":
            return self.answer(json.dumps(self.server.log).encode())
        said = {"path": self.path, "range": self.headers["Range"], "token": self.headers["Authorization"]}
        self.server.log.append({"method": self.command} | said)
        fault = self.server.fault(self.path, self.headers["Range"]) or {}
        if fault.get("hang_up"):
            self.close_connection = True
            return None
        if "body" in fault:
            return self.answer(fault["body"].encode(), 200, fault.get("headers", {}))
        if status := fault.get("status"):
            message = {"error": {"message": f"a fault of the test: {status}"}}
            return self.answer(json.dumps(message).encode(), status, fault.get("headers", {}))
        parts = [unquote(part) for part in url.path.removeprefix("/mirror").strip("/").split("/")]
        match parts:
            case ["api", "models", owner, name, "revision", _]:
                self.hub_info(f"{owner}/{name}")
            case ["api", "models", owner, name, "tree", *_]:
                self.hub_tree(f"{owner}/{name}")
            case ["cdn", *path]:
                self.send_file(self.server.root.joinpath("hub", *path), fault)
            case [owner, name, "resolve", _, file]:
                self.hub_file(f"{owner}/{name}", file, fault)
            case ["storage", "v1", "b", bucket, "o"]:
                self.list_bucket(bucket, parse_qs(url.query))
            case ["storage", "v1", "b", bucket, "o", name]:
                self.bucket_file(bucket, name, parse_qs(url.query), fault)
            case _:
                self.answer(b"", 404)
        return None

    def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def repository(self, id: str) -> Path | None:
        folder = self.server.root / "hub" / id
        is_known = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if "private" in id and not is_known:
            self.answer(b"", 401, {"X-Error-Message": "Invalid username or password."})
        elif "gated" in id and not is_known and not self.path.startswith("/api/"):
            self.answer(
                b"", 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {id} is restricted."}
            )
        elif not folder.is_dir():
            self.answer(b"", 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        else:
            return folder
        return None

    def hub_info(self, id: str) -> None:
        if folder := self.repository(id):
            siblings = [hub_entry(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]
            self.answer(json.dumps({"id": id, "sha": COMMIT, "siblings": siblings}).encode())

    def hub_tree(self, id: str) -> None:
        if folder := self.repository(id):
            tree = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": git_digest(path)}
                for path in sorted(folder.iterdir())
                if path.is_file()
            ]
            self.answer(json.dumps(tree).encode())

    def hub_file(self, id: str, file: str, fault: dict) -> None:
        folder = self.repository(id)
        if folder is None:
            return
        path = folder / file
        if not path.is_file():
            self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
        elif is_large(path):
            # By another name of the same machine, as the hub's content lies elsewhere.
            port = self.server.server_address[1]
            headers = {"Location": f"http://localhost:{port}/cdn/{id}/{quote(file)}", "X-Repo-Commit": COMMIT}
            headers |= {"X-Linked-Etag": f'"{sha256(path)}"', "X-Linked-Size": str(path.stat().st_size)}
            self.answer(b"", 302, headers)
        else:
            self.send_file(path, fault, {"ETag": f'"{git_digest(path)}"', "X-Repo-Commit": COMMIT})

    def bucket(self, name: str) -> Path | None:
        folder = self.server.root / "gs" / name
        if "private" in name:
            self.answer(json.dumps({"error": {"message": "Anonymous caller has no access."}}).encode(), 403)
        elif not folder.is_dir():
            self.answer(json.dumps({"error": {"message": "The specified bucket does not exist."}}).encode(), 404)
        else:
            return folder
        return None

    def list_bucket(self, bucket: str, query: dict[str, list[str]]) -> None:
        folder = self.bucket(bucket)
        if folder is None:
            return
        prefix, start = query.get("prefix", [""])[0], int(query.get("pageToken", ["0"])[0])
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        names = [name for name in names if name.startswith(prefix) and "/" not in name[len(prefix) :]]
        items = [
            {
                "name": name,
                "size": str((folder / name).stat().st_size),
                "generation": generation(folder / name),
                "crc32c": crc32c(folder / name),
            }
            for name in names[start : start + 3]  # pages are short, so that there are several
        ]
        page = {"items": items} | ({"nextPageToken": str(start + 3)} if len(names) > start + 3 else {})
        self.answer(json.dumps(page).encode())

    def bucket_file(self, bucket: str, name: str, query: dict[str, list[str]], fault: dict) -> None:
        folder = self.bucket(bucket)
        if folder is None:
            return
        path = folder / name
        if not path.is_file() or query["generation"] != [generation(path)]:
            self.answer(json.dumps({"error": {"message": f"No such object: {bucket}/{name}"}}).encode(), 404)
        else:
            self.send_file(path, fault)

    def send_file(self, path: Path, fault: dict, headers: dict[str, str] | None = None) -> None:
        """A file or a range of it, as a fault would have it."""
        size = path.stat().st_size
        first, last = 0, size - 1
        wanted = None if fault.get("no_ranges") else self.headers["Range"]
        if wanted:
            low, high = wanted.removeprefix("bytes=").split("-")
            first, last = int(low), min(int(high), last)
        with path.open("rb") as file:
            file.seek(first)
            body = bytearray(file.read(last - first + 1))
        if fault.get("flip") and body:
            body[len(body) // 2] ^= 1
        length = len(body) + fault.get("length_off_by", 0)
        self.send_response(206 if wanted else 200)
        given = {"Content-Length": str(length)} | (headers or {})
        if wanted:
            given["Content-Range"] = f"bytes {first}-{last}/{size}"
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = int(len(body) * fault["cut"]) if "cut" in fault else min(length, len(body))
        step = fault.get("bytes_a_second", 2**30)
        for start in range(0, cut, step):
            self.wfile.write(body[start : min(start + step, cut)])
            if step < 2**30:
                time.sleep(1)
        self.wfile.flush()
        time.sleep(fault.get("stall", 0))
        if fault.get("reset"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if cut < length or fault.get("length_off_by"):
            self.close_connection = True


def is_large(path: Path) -> bool:
    return path.stat().st_size >= LARGE


def hub_entry(folder: Path, path: Path) -> dict:
    size = path.stat().st_size
    entry = {"rfilename": str(path.relative_to(folder)), "size": size, "blobId": git_digest(path)}
    return entry | {"lfs": {"sha256": sha256(path), "size": size, "pointerSize": 130}} if is_large(path) else entry


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git_digest(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def crc32c(path: Path) -> str:
    return base64.b64encode(google_crc32c.Checksum(path.read_bytes()).digest()).decode()


def generation(path: Path) -> str:
    return str(path.stat().st_mtime_ns)


if __name__ == "__main__":
    StandIn(Path(sys.argv[1]), int(sys.argv[2])).serve_forever()
