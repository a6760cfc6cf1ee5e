"""What README.md points to is there. The other documents are pages of the site, which is strict about it."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_every_link_of_the_readme_to_a_file_leads_to_one():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (README.parent / link).exists()] == []
