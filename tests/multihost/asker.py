"""Asks a server everything at once: `asker.py URL`, bodies as JSON on stdin, and on stdout what came of each."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx


def ask(url: str, body: dict) -> dict:
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=100)
    except httpx.HTTPError as error:
        return {"status": 0, "error": repr(error)}
    if answer.status_code != 200:
        return {"status": answer.status_code, "error": answer.text}
    return {"status": 200, "choice": answer.json()["choices"][0]}


if __name__ == "__main__":
    bodies = json.load(sys.stdin)
    with ThreadPoolExecutor(len(bodies)) as pool:
        json.dump(list(pool.map(lambda body: ask(sys.argv[1], body), bodies)), sys.stdout)
