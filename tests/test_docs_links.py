"""What the documents point to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "benchmarks", "training", "examples/adapters")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_to_a_file_leads_to_one(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
