"""docs/api.md says what the declarations of requests say."""

import re

from hex_llm.server.docs import OPERATIONS
from scripts import api_page


def test_the_tables_of_the_page_are_up_to_date():
    page = api_page.PAGE.read_text()
    assert api_page.written(page) == page, "run: .venv/bin/python scripts/api_page.py"


def test_the_page_has_a_table_for_every_route_that_takes_a_body():
    parts = re.findall(r"<!-- fields of (/\S+) -->", api_page.PAGE.read_text())
    assert parts == [operation.path for operation in OPERATIONS if operation.fields]


def test_a_table_has_every_field_with_its_limit_and_its_default():
    page = api_page.written("<!-- fields of /v1/completions -->\n<!-- end -->")
    assert "| `n` | integer, 1 to `--max_n` (128) | `1` | Answers to each prompt. |" in page
    assert "| `max_tokens` | integer, 1 to 2^31 - 1 | `16` |" in page
    assert '`suffix` (`""`)' in page
