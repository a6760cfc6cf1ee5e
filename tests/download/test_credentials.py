"""Who asks Cloud Storage: the account of Application Default Credentials, or nobody."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from hex_llm.download import cloud_storage
from hex_llm.download.cloud_storage import BucketSource
from hex_llm.download.fetch import fetch
from hex_llm.download.reference import InBucket
from hex_llm.download.wanted import TEXT
from hex_llm.errors import DownloadError


class Tokens(BaseHTTPRequestHandler):
    """Gives a token to everybody, as long as `grants` says so."""

    grants = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = {"access_token": "ya29.test", "expires_in": 3600} if self.grants else {"error": "no"}
        body = json.dumps(answer).encode()
        self.send_response(200 if self.grants else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def account(stand_in, tmp_path, monkeypatch):
    """A service account, whose tokens come from here."""
    server = HTTPServer(("127.0.0.1", 0), Tokens)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    account = {"type": "service_account", "project_id": "p", "private_key_id": "1", "private_key": pem}
    account |= {"client_email": "a@b", "token_uri": f"http://127.0.0.1:{server.server_port}/token"}
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setattr(cloud_storage, "_ADDRESS", stand_in.url)
    (stand_in.bucket(f"models/{tmp_path.name}") / "config.json").write_text("{}")
    yield
    server.shutdown()


def test_the_account_of_the_environment_asks(account, stand_in, tmp_path):
    fetch(BucketSource(InBucket("models", tmp_path.name), tmp_path), TEXT, timeout_s=5)
    asked = [each["token"] for each in stand_in.log() if tmp_path.name in each["path"]]
    assert asked == ["Bearer ya29.test"] * 2
    with pytest.raises(DownloadError, match="The account may not read it"):
        fetch(BucketSource(InBucket("private-bucket"), tmp_path), TEXT, timeout_s=5)


def test_an_account_that_gets_no_token_is_told(account, tmp_path, monkeypatch):
    monkeypatch.setattr(Tokens, "grants", False)
    with pytest.raises(DownloadError, match="The credentials for Cloud Storage are of no use"):
        fetch(BucketSource(InBucket("models", tmp_path.name), tmp_path), TEXT, timeout_s=5)


def test_without_credentials_one_asks_as_anybody(stand_in, tmp_path, monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setattr(cloud_storage, "_ADDRESS", stand_in.url)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DownloadError, match="No credentials were found, so it was asked as anybody"):
        fetch(BucketSource(InBucket("private-bucket"), tmp_path), TEXT, timeout_s=5)
