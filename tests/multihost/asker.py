"""Asks a server everything at once: `asker.py URL`, bodies as JSON on stdin. Stdout has a line when the first answer is
under way, and at last one with what came of each."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx

_lock, _said = threading.Lock(), []


def ask(url: str, body: dict) -> dict:
    text = ""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=100) as answer:
            if answer.status_code != 200:
                return {"status": answer.status_code, "error": answer.read().decode()}
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return {"status": 200, "text": text}
                event = json.loads(line[6:]) if line.startswith("data: ") else {}
                if "error" in event:
                    return {"status": 500, "error": event["error"]["message"]}
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                say_once()
    except httpx.HTTPError as error:
        return {"status": 0, "error": repr(error)}
    return {"status": 0, "error": "the stream just ended"}


def say_once() -> None:
    with _lock:
        if not _said:
            _said.append(True)
            print("under way", flush=True)


if __name__ == "__main__":
    bodies = json.load(sys.stdin)
    with ThreadPoolExecutor(len(bodies)) as pool:
        print(json.dumps(list(pool.map(lambda body: ask(sys.argv[1], body), bodies))))
