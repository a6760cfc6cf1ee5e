"""/docs and /openapi.json tell of every route."""

import orjson

from hex_llm.config import Config
from hex_llm.server import pages
from hex_llm.server.app import routes
from hex_llm.server.docs import OPERATIONS, describe_api


class Served:
    config = Config(enable_docs=True)


def test_every_route_is_documented():
    table = routes(Served(), {})  # pyright: ignore[reportArgumentType]
    documented = {each.path: each.method for each in OPERATIONS if "{" not in each.path}
    assets = [path for path in pages.FILES if path != "/"]  # the page says what it is made of
    assert documented == {path: route.method for path, route in table.items() if path not in assets}
    described = describe_api(Served.config)
    for each in OPERATIONS:
        assert ("requestBody" in described["paths"][each.path][each.method.lower()]) == (each.method == "POST")
    assert orjson.dumps(described)
