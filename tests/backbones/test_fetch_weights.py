"""Weights outside the wheel: fetched from a server that works, breaks off or lies, or from a folder."""

from __future__ import annotations

import hashlib
import json
import resource
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ifsl_bench.backbones import fetch_weights, pretrained
from ifsl_bench.backbones.fetch_weights import read_weights_list

CLONE = Path(__file__).parents[2] / "results" / "weights"
KEY = "tiny-pack-resnet10-stempool-linear-seed0-880b9801ae93"
CONTENT = (CLONE / f"{KEY}.safetensors").read_bytes()


class Site(ThreadingHTTPServer):
    """A server of one file.

    Args:
        ranges: whether it sends the rest of a file.
        most: bytes after which it breaks off.
        sized: whether it sends lengths.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.path, self.content, self.ranges, self.most, self.sized = f"/w/{KEY}.safetensors", CONTENT, True, None, True
        self.asked: list[str | None] = []
        self.address = f"http://127.0.0.1:{self.server_port}/w/"

    def handle_error(self, *_) -> None:
        """A client that has read enough is no error."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        site = self.server
        site.asked.append(self.headers["Range"])
        if self.path != site.path:
            self.send_error(404)
            return
        start = 0
        if site.ranges and self.headers["Range"]:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}")
        else:
            self.send_response(200)
        if site.sized:
            self.send_header("Content-Length", str(len(site.content) - start))
        self.end_headers()
        self.wfile.write(site.content[start:][: site.most])


@pytest.fixture
def site():
    with Site() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def fetch(call, tmp_path, monkeypatch):
    """Runs 'weights fetch' as where a wheel is installed, into an empty home; the home is its attribute."""
    monkeypatch.setattr(pretrained, "PACKAGED_FOLDERS", pretrained.PACKAGED_FOLDERS[:1])

    def run(source: str | None = None, key: str = KEY) -> tuple[int, str, str]:
        return call("weights", "fetch", key, "--home", str(tmp_path), *(("--from", source) if source else ()))

    run.home, run.file = tmp_path, tmp_path / "weights" / f"{KEY}.safetensors"
    return run


def kept(fetch) -> list[int]:
    """The sizes of what an interrupted download has left."""
    return [path.stat().st_size for path in fetch.home.rglob(".partial-*")]


def refused(fetch, source: str, words: str) -> None:
    status, out, err = fetch(source)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not fetch.file.exists(), "nothing unchecked has its name"


def test_the_list_has_the_files_of_the_repository_and_no_other():
    files = {path.stem: path.read_bytes() for path in CLONE.iterdir()}
    listed = {key: (file.size, file.sha256) for key, file in read_weights_list().files.items()}
    assert listed == {key: (len(content), hashlib.sha256(content).hexdigest()) for key, content in files.items()}


def test_in_a_clone_they_are_here(call, tmp_path):
    status, out, _ = call("weights", "fetch", KEY, "--home", str(tmp_path))
    assert (status, out) == (0, f"{CLONE / KEY}.safetensors: here already\n")


def test_fetched_weights_are_listed_as_the_packages(fetch, site, call):
    def where() -> str:
        rows = json.loads(call("weights", "list", "--home", str(fetch.home), "--format", "json")[1])
        return next(row["where"] for row in rows if row["pretraining"] == KEY)

    assert where() == "to be fetched, 5.3 MB"
    status, out, err = fetch(site.address)
    assert (status, out) == (0, f"{fetch.file}\n"), err
    assert fetch.file.read_bytes() == CONTENT
    assert where() == "package"
    assert fetch(site.address)[1] == f"{fetch.file}: here already\n"
    assert site.asked == [None]
    fetch.file.write_bytes(CONTENT[:-1] + b"x")
    assert fetch(site.address)[1] == f"{fetch.file}\n", "a damaged file is fetched again"
    assert fetch.file.read_bytes() == CONTENT
    assert kept(fetch) == []


@pytest.mark.parametrize("sized", [True, False])
def test_a_download_goes_on_where_the_server_broke_off(fetch, site, sized):
    site.most, site.sized = 2_000_000, sized
    refused(fetch, site.address, "(the connection broke off); 2,000,000 of 5,280,734 bytes are kept, and the same")
    refused(fetch, site.address, "4,000,000 of 5,280,734 bytes are kept")
    assert kept(fetch) == [4_000_000]
    assert fetch(site.address)[0] == 0
    assert fetch.file.read_bytes() == CONTENT
    assert site.asked == [None, "bytes=2000000-", "bytes=4000000-"]
    assert kept(fetch) == []


def test_a_server_without_ranges_sends_the_whole_file_again(fetch, site):
    site.most, site.ranges = 2_000_000, False
    refused(fetch, site.address, "2,000,000 of 5,280,734 bytes are kept")
    site.most = 1_000_000
    refused(fetch, site.address, "1,000,000 of 5,280,734 bytes are kept")
    site.most = None
    assert fetch(site.address)[0] == 0
    assert fetch.file.read_bytes() == CONTENT


def test_another_file_is_refused_and_not_kept(fetch, site):
    site.content = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    refused(fetch, site.address, "is another file than the listed one: its SHA-256 is not cb1fab3983ac8a7fb9cb4d18")
    site.content = CONTENT + b"x"
    refused(fetch, site.address, "has 5,280,735 bytes, expected 5,280,734: it is another file")
    site.sized = False
    refused(fetch, site.address, "is another file than the listed one")
    assert kept(fetch) == []


def test_the_end_of_one_file_behind_the_start_of_another_is_refused_and_the_next_download_is_whole(fetch, site):
    site.content, site.most = bytes(len(CONTENT)), 2_000_000
    refused(fetch, site.address, "2,000,000 of 5,280,734 bytes are kept")
    site.content, site.most = CONTENT, None
    refused(fetch, site.address, "nothing is kept")
    assert fetch(site.address)[0] == 0
    assert fetch.file.read_bytes() == CONTENT


def test_what_is_not_there_is_said_in_one_line(fetch, site):
    refused(fetch, site.address + "elsewhere", "cannot be fetched (HTTP Error 404: Not Found)")
    refused(fetch, "http://127.0.0.1:9", "Connection refused")
    refused(fetch, "nowhere://x", "unknown url type: nowhere")
    refused(fetch, "http://[", "cannot be fetched (")
    refused(fetch, str(fetch.home / "nothing"), "No such file")
    status, _, err = fetch(site.address, "tiny-pack-resnet10")
    assert (status, f"unknown weights 'tiny-pack-resnet10'; did you mean '{KEY}'" in err) == (2, True), err


def test_a_full_disk_is_said_and_the_download_goes_on_when_there_is_room(fetch, site):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))  # refuses writes as a full disk does
    try:
        refused(fetch, site.address, f"cannot write {fetch.file}: ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (size,) = kept(fetch)
    assert fetch(site.address)[0] == 0
    assert fetch.file.read_bytes() == CONTENT
    assert site.asked == [None, f"bytes={size}-"]


def test_they_come_from_a_folder_and_from_the_address_of_the_list(fetch, site, tmp_path, monkeypatch):
    status, _, err = fetch()
    assert (status, "say where it is with --from URL|FOLDER" in err) == (2, True)
    assert fetch(str(CLONE))[0] == 0
    assert fetch.file.read_bytes() == CONTENT
    fetch.file.unlink()
    text = fetch_weights.WEIGHTS_LIST_FILE.read_text()
    (tmp_path / "list.toml").write_text(text.replace('address = ""', f'address = "{site.address}"'))
    monkeypatch.setattr(fetch_weights, "WEIGHTS_LIST_FILE", tmp_path / "list.toml")
    assert fetch()[0] == 0
    assert fetch.file.read_bytes() == CONTENT
    assert site.asked == [None]
