"""What schemathesis should not complain of."""

import json
from typing import Any

import schemathesis


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """streaming_tokens without stream makes a body of several JSON objects, as Hex-LLM's clients want it: no schema
    has words for that.
    """
    return not (case.path == "/generate" and type(failure).__name__ == "MalformedJson" and _is_pieces(response.text))


def _is_pieces(text: str) -> bool:
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        try:
            piece, place = decoder.raw_decode(text, place)
        except ValueError:
            return False
        if "predictions" not in piece:
            return False
    return True
