"""The site that docs/ makes: it is built strictly, and asks nobody else for anything."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a browser fetches by itself, by the attribute that says from where.
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = build(ROOT, out)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return out


def test_the_nav_has_every_page_of_docs(site):
    nav = (site / "index.html").read_text()
    pages = [page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index"]
    assert len(pages) > 20
    assert [page for page in pages if f'href="{page}/"' not in nav] == []


def test_a_page_loads_nothing_from_outside(site):
    loaded = {url for page in site.rglob("*.html") for url in Assets.of(page.read_text())}
    styles = {
        url.strip("\"'")
        for sheet in site.rglob("*.css")
        for url in re.findall(r"(?:url\(|@import )([^);]+)", sheet.read_text())
    }
    assert any(url.endswith(".js") for url in loaded)
    assert [url for url in loaded | styles if re.match(r"\w+:(?!image/)|//", url)] == []


def test_a_link_to_a_document_outside_docs_leads_to_its_page(site):
    page = (site / "performance" / "index.html").read_text()
    assert 'href="../training/"' in page
    assert (site / "training" / "index.html").exists()


def test_lists_and_tables_are_no_text(site):
    """GitHub needs no empty line before a list, nor four spaces before what belongs to its entry; the site does."""
    left = {
        (page.parent.name, text[:80])
        for page in site.rglob("index.html")
        for text in re.findall(r"<p>[^<]*?^ *((?:[-*]|\d+\.|\|) .*)", page.read_text(), re.MULTILINE)
    }
    assert left == set()


@pytest.fixture(scope="module")
def refusal(tmp_path_factory) -> str:
    """What is said of a page with every mistake that a strict build has to find."""
    root = tmp_path_factory.mktemp("repository")
    for name in ("mkdocs.yml", "docs/stylesheets/site.css", "scripts/docs_links.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "docs" / "index.md").write_text("# Home\n\n[a page](nowhere.md) [a part](#nothing) [a file](../gone.py)\n")
    (root / "docs" / "lonely.md").write_text("# A page that the nav does not have\n\n[a program](../mkdocs.yml)\n")
    built = build(root, root / "out")
    assert built.returncode != 0
    return built.stderr


@pytest.mark.parametrize("mistake", ["nowhere.md", "#nothing", "../gone.py", "lonely.md", "server.md"])
def test_a_mistake_fails_the_build_and_is_named(refusal, mistake):
    assert mistake in refusal


def test_a_link_to_a_file_that_is_no_page_is_no_mistake(refusal):
    assert "../mkdocs.yml" not in refusal


class Assets(HTMLParser):
    """The addresses that a page has something fetched from."""

    def __init__(self):
        super().__init__()
        self.urls: list[str] = []

    @classmethod
    def of(cls, html: str) -> list[str]:
        parser = cls()
        parser.feed(html)
        return parser.urls

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        # Other pages of the site, which a link may name for the keyboard's sake, are not fetched.
        if tag in FETCHED and given.get("rel") not in ("next", "prev") and (url := given.get(FETCHED[tag])):
            self.urls.append(url)
