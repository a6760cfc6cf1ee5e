"""The playground: its files over HTTP, and the page itself in a real Chromium, against a real server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hex_llm.server import pages
from tests.server.browser import (
    CHROMEDRIVER,
    CHROMIUM,
    DOWN,
    ENTER,
    ESCAPE,
    RIGHT,
    SHIFT,
    TAB,
    UP,
    Browser,
    running_browser,
)
from tests.server.servers import RunningServer, running_server

KEY = "sk-playground"
ADAPTER = Path(__file__).parents[2] / "examples" / "adapters" / "shouting"
FLAGS = (
    "--max_model_len=512",
    "--enable_prefix_cache_hbm",
    "--enable_lora",
    "--max_num_mem_cached_lora=2",
    f"--lora_modules=shouting={ADAPTER}",
)
PARIS = "What is the capital of France?"

REQUIRED = os.environ.get("HEX_LLM_REQUIRE_ORACLE") == "1"  # as in CI, which may skip nothing
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER) and not REQUIRED,
    reason="no chromium and chromedriver on the PATH; `scripts/setup browser` installs them where there is apt.",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(None, log, *FLAGS, keys=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser") / "log") as running:
        yield running


@pytest.fixture
def page(server: RunningServer, browser: Browser) -> Iterator[Browser]:
    """The page as somebody finds it who has given the key. Afterwards it has asked nobody but the server, and nothing
    has gone wrong in it.
    """
    browser.resize(1280, 800)
    browser.prefer("light")
    browser.open(server.url)
    browser.run("sessionStorage.clear(); sessionStorage.setItem('hex-llm-key', arguments[0])", KEY)
    browser.open(server.url)
    browser.wait(lambda: browser.text("#status") == "ready")
    browser.log()
    yield browser
    # What the network tells of answers such as 400 is no fault of the page.
    assert [entry for entry in browser.log() if entry["source"] != "network"] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    asked = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith((server.url, "data:", "chrome"))] == []


def say(page: Browser, text: str, seconds: float = 30) -> str:
    """Sends a text and waits for the end of the answer, which it returns."""
    page.type("#input", text + ENTER)
    finish(page, seconds)
    return page.text(".answer .text")


def finish(page: Browser, seconds: float = 30) -> None:
    page.wait(lambda: page.is_shown("#send"), seconds)


def measures(page: Browser) -> list[str]:
    """What the last answer says of itself."""
    return page.run("return [...[...document.querySelectorAll('.measures')].at(-1).children].map((e) => e.innerText)")


def set_argument(page: Browser, name: str, value: str) -> None:
    page.type(f"#argument-{name}", value)


def prompt_tokens(page: Browser) -> int:
    return int(measures(page)[3].split()[2])


# Over HTTP


def test_every_file_comes_with_its_type_and_a_strict_policy(server: RunningServer) -> None:
    types = {"": "text/html", "html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert {"/", "/playground/main.js", "/playground/style.css", "/playground/icon.svg"} <= pages.FILES.keys()
    for path in pages.FILES:
        response = httpx.get(server.url + path)  # without a key
        assert response.status_code == 200
        assert response.headers["content-type"].split(";")[0] == types[path.rpartition("/")[2].rpartition(".")[2]]
        assert response.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(server.url + path, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", response.headers["etag"])
        stale = httpx.get(server.url + path, headers={"If-None-Match": '"other"'})
        assert stale.content == response.content
        head = httpx.head(server.url + path)
        assert (head.status_code, head.content) == (200, b"")
        assert httpx.post(server.url + path).status_code == 405


def test_the_page_names_nothing_from_elsewhere_and_every_file_it_names_is_there() -> None:
    for path, file in pages.FILES.items():
        text = file.body.decode()
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
        if path == "/":
            assert "<style" not in text
            assert " style=" not in text
            assert "<script>" not in text
            named = [part.split('"')[0] for part in text.split('="') if part.startswith("/playground/")]
            assert named
            assert set(named) <= pages.FILES.keys()


@pytest.mark.parametrize(
    "path",
    [
        "/playground/", "/playground/index.html", "/playground/none.js", "/playground/../pages.py",
        "/playground/%2e%2e/pages.py", "/playground/..%2fpages.py", "/playground/../../../etc/passwd",
        "/playground//etc/passwd", "/index.html", "//",
    ],
)  # fmt: skip
def test_there_are_no_other_files(server: RunningServer, path: str) -> None:
    # httpx would tidy the path up.
    command = ["curl", "-s", "-o", "-", "-w", "%{http_code}", "--path-as-is", "-H", f"Authorization: Bearer {KEY}"]
    answer = subprocess.run([*command, server.url + path], capture_output=True, text=True, check=True).stdout
    assert answer.endswith("404")
    assert '"code":"not_found"' in answer
    assert httpx.get(server.url + path).status_code == 401  # who has no key is not told even that


def test_what_the_page_asks_for_needs_the_key(server: RunningServer) -> None:
    for path in ("/playground/card.json", "/metrics", "/v1/models"):
        assert httpx.get(server.url + path).status_code == 401
        assert server.get(path).status_code == 200


def test_the_card_tells_what_is_served_and_within_which_limits(server: RunningServer) -> None:
    card = server.get("/playground/card.json").json()
    weights = 7_605_504
    assert (card["architecture"], card["num_parameters"], card["context"]) == ("LlamaForCausalLM", weights, 512)
    assert (card["names"], card["dtype"], card["quantization"]) == (["hex-mini"], "bfloat16", None)
    assert card["flags"]["enable_prefix_cache_hbm"] is True
    assert "warmup" not in card["flags"]  # it is as it would be anyway
    assert not {"port", "api_key_file"} & card["flags"].keys()
    assert KEY not in json.dumps(card)
    for name, limits in card["arguments"].items():
        body = {"prompt": "a", **({} if name == "max_tokens" else {"max_tokens": 1})}
        lowest = limits["minimum"] if "minimum" in limits else limits["exclusiveMinimum"] + 0.01
        values = [lowest] if name == "max_tokens" else [lowest, limits["maximum"]]
        assert [server.post("/v1/completions", {**body, name: value}).status_code for value in values] == [200] * len(
            values
        )


def test_the_page_is_there_while_the_server_starts_and_not_where_it_is_switched_off(tmp_path: Path) -> None:
    for flags, status in (((), 200), (("--no-playground",), 404)):
        with running_server(None, tmp_path / "log", *flags, ready=False) as server:
            transport = httpx.HTTPTransport(retries=10)
            with httpx.Client(transport=transport, base_url=server.url, timeout=30) as client:
                assert [client.get(path).status_code for path in ("/", "/playground/main.js")] == [status] * 2
                assert client.get("/playground/card.json").status_code == (503 if status == 200 else 404)


def test_paths_that_vertex_names_come_before_the_page(tmp_path: Path) -> None:
    client = httpx.Client(transport=httpx.HTTPTransport(retries=10), timeout=30)
    with client, running_server(None, tmp_path / "log", ready=False, AIP_HEALTH_ROUTE="/") as server:
        assert client.get(server.url + "/").json()["status"] == "starting"


# In a browser


@needs_browser
def test_a_key_is_asked_for_and_kept_for_the_tab(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.run("sessionStorage.clear()")
    browser.open(server.url)
    browser.wait(lambda: browser.is_shown("#key-dialog"))
    assert browser.run("return document.activeElement.id") == "key"
    assert not browser.is_shown("#key-error")
    browser.type("#key", "sk-wrong" + ENTER)
    browser.wait(lambda: browser.is_shown("#key-error"))
    refused = httpx.get(server.url + "/v1/models", headers={"Authorization": "Bearer sk-wrong"})
    assert browser.text("#key-error") == refused.json()["error"]["message"]
    browser.run("document.querySelector('#key').value = ''")
    browser.type("#key", KEY + ENTER)
    browser.wait(lambda: browser.text("#status") == "ready")
    assert "Paris" in say(browser, PARIS)
    browser.open(server.url)
    browser.wait(lambda: browser.text("#status") == "ready")
    assert browser.run("return [sessionStorage.getItem('hex-llm-key'), localStorage.length]") == [KEY, 0]
    assert KEY not in browser.text("#code")


@needs_browser
def test_an_answer_comes_piece_by_piece_and_the_next_message_goes_with_it(page: Browser) -> None:
    # Every length that the answer has on its way, as the page draws it.
    page.run(
        "window.lengths = []; new MutationObserver(() => {"
        " const answer = document.querySelector('.answer[aria-busy=true] .text');"
        " if (answer) window.lengths.push(answer.textContent.length);"
        "}).observe(document.querySelector('#turns'), { subtree: true, childList: true })"
    )
    set_argument(page, "temperature", "0")
    assert "Paris" in say(page, PARIS)
    assert len({length for length in page.run("return window.lengths") if length}) >= 3
    tokens, speed, first, cached, *_ = measures(page)
    assert tokens.endswith(" tokens")
    assert speed.endswith(" tokens/s")
    assert first.startswith("TTFT ")
    assert cached.endswith(" prompt tokens cached")
    before = prompt_tokens(page)
    say(page, "Count from 3 to 9.")
    assert prompt_tokens(page) > before + int(tokens.split()[0])
    assert page.run("return document.querySelectorAll('.turn').length") == 2
    page.click("#clear")
    assert page.is_shown("#empty")
    say(page, PARIS)
    assert prompt_tokens(page) == before


@needs_browser
@pytest.mark.parametrize(
    "stop",
    ["document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }))",
     "document.querySelector('#stop').click()"],
    ids=["Escape", "button"],
)  # fmt: skip
def test_an_answer_is_stopped_and_retry_makes_it_anew(server: RunningServer, page: Browser, stop: str) -> None:
    cancelled = 'hexllm:requests_total{outcome="cancelled",route="/v1/chat/completions"}'
    before = server.metrics().get(cancelled, 0)
    # By the page's own clock: with one of the first pieces, however fast they come.
    page.run(
        f"let changes = 0; new MutationObserver(() => {{ if (++changes === 6) {stop} }})"
        ".observe(document.querySelector('#turns'), { subtree: true, childList: true })"
    )
    set_argument(page, "temperature", "0")
    story = "Count from 1 to 60."
    stopped = say(page, story)
    assert measures(page)[-1] == "stopped"
    assert measures(page)[0].endswith("tokens")
    page.wait(lambda: server.metrics().get(cancelled, 0) == before + 1)
    page.click(".turn:last-child .foot button:last-child")
    page.wait(lambda: page.is_shown("#stop") or len(page.text(".answer .text")) > len(stopped))
    finish(page)
    assert page.run("return document.querySelectorAll('.turn').length") == 1
    assert page.text(".answer .text").startswith(stopped)
    assert len(page.text(".answer .text")) > len(stopped)
    assert "stopped" not in measures(page)


@needs_browser
def test_what_was_asked_before_is_found_in_the_cache(page: Browser) -> None:
    set_argument(page, "max_tokens", "2")
    say(page, "Repeat this: " + "one two three four five six seven eight nine ten " * 6)
    page.click(".turn:last-child .foot button:last-child")
    page.wait(lambda: page.is_shown("#send") and measures(page)[3:] and not measures(page)[3].startswith("0 of"))
    page.wait(lambda: page.text("#hits") not in ("–", "0 %"))


@needs_browser
def test_arguments_are_sent_and_their_limits_are_told(page: Browser) -> None:
    set_argument(page, "max_tokens", "5")
    set_argument(page, "seed", "7")
    first = say(page, "Tell me a story.")
    assert measures(page)[0] == "5 tokens"
    assert measures(page)[-1] == "ended at max_tokens"
    page.click(".turn:last-child .foot button:last-child")
    finish(page)
    assert page.text(".answer .text") == first

    set_argument(page, "top_p", "2")
    assert page.text("#argument-top_p-problem") == "This has to be above 0 and at most 1."
    page.type("#input", "Not this." + ENTER)
    assert page.run("return document.activeElement.id") == "argument-top_p"
    assert page.run("return document.querySelectorAll('.turn').length") == 1

    page.click("#reset")
    page.click("#clear")
    page.run("document.querySelector('#input').value = ''")
    page.run("document.querySelector('#argument-temperature').focus()")
    page.press(UP)
    assert page.run("return document.activeElement.value") == "1.1"
    page.press(DOWN)
    page.press(DOWN)
    assert page.run("return document.activeElement.value") == "0.9"
    page.run("document.querySelector('#argument-seed').focus()")
    page.press(UP)
    assert page.run("return document.activeElement.value") == "1"
    page.click("#reset")
    set_argument(page, "top_k", "1")
    set_argument(page, "stop", "Par")
    assert say(page, PARIS).strip() == "The capital of France is"
    page.click("#reset")
    page.run(
        "const adapter = document.querySelector('#argument-adapter'); adapter.value = 'shouting';"
        "adapter.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    set_argument(page, "top_k", "1")
    page.click("#clear")
    assert "THE CAPITAL" in say(page, PARIS)


@needs_browser
@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_the_request_as_code_gives_the_same_answer(page: Browser, tmp_path: Path, mode: str) -> None:
    page.click(f"input[name=mode][value={mode}] + span")
    page.click("#code-box summary")
    set_argument(page, "max_tokens", "12")
    set_argument(page, "seed", "3")
    set_argument(page, "top_k", "40")
    set_argument(page, "stop", "it's\\n")
    answer = say(page, "It's \"quoted\" and 'so'.\\")
    environment = os.environ | {"HEXLLM_API_KEY": KEY}
    command = page.run("return document.querySelector('#code').textContent")
    events = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True).stdout
    chunks = [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n")[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [choice["delta"].get("content") or "" if mode == "chat" else choice["text"] for choice in choices]
    assert "".join(told).strip() == answer.strip()
    page.click("input[value=python] + span")
    program = tmp_path / "program.py"
    program.write_text(page.run("return document.querySelector('#code').textContent"))
    ran = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == answer.strip()


@needs_browser
def test_a_prompt_is_gone_on_with_as_it_is(server: RunningServer, page: Browser) -> None:
    page.click("input[value=completion] + span")
    set_argument(page, "temperature", "0")
    answer = say(page, "The capital of France")
    told = server.post("/v1/completions", {"prompt": "The capital of France", "temperature": 0}).json()
    assert answer.strip() == told["choices"][0]["text"].strip()
    assert measures(page)[0] == f"{told['usage']['completion_tokens']} tokens"
    page.click("input[value=chat] + span")
    assert page.is_shown("#empty")


@needs_browser
def test_the_servers_error_is_shown_and_the_conversation_goes_on(server: RunningServer, page: Browser) -> None:
    text = "word " * 600
    page.run("document.querySelector('#input').value = arguments[0]", text)
    shown = say(page, "")
    body = {"messages": [{"role": "user", "content": text.strip()}]}
    assert shown == server.post("/v1/chat/completions", body).json()["error"]["message"]
    assert page.run("return document.querySelector('.answer [role=alert]').innerText") == shown
    assert "Paris" in say(page, PARIS)
    assert prompt_tokens(page) < 20  # what failed is not sent again


@needs_browser
def test_the_engine_and_the_model_are_shown(server: RunningServer, page: Browser) -> None:
    rows = page.text("#card").splitlines()
    facts = dict(zip(rows[::2], rows[1::2], strict=False))
    assert (facts["Family"], facts["Size"]) == ("Llama", "7.61 M parameters")
    assert (facts["Context"], facts["dtype"], facts["Quantization"]) == ("512 tokens", "bfloat16", "none")
    assert "--enable_prefix_cache_hbm" in page.text("#card code").splitlines()
    set_argument(page, "temperature", "0")
    page.type("#input", "Count from 1 to 60." + ENTER)
    page.wait(lambda: page.text("#throughput") not in ("–", "0.0"))
    finish(page)
    page.wait(lambda: page.text("#running") == "0" and page.text("#queued") == "0")
    assert page.text("#kv").endswith(" %")


@needs_browser
def test_the_keyboard_is_enough(page: Browser) -> None:
    assert page.run("return document.activeElement.id") == "input"
    page.type("#input", "one")
    page.press(SHIFT, ENTER)
    page.type("#input", "two")
    assert page.run("return document.querySelector('#input').value") == "one\ntwo"
    page.press(TAB)
    assert page.run("return document.activeElement.id") == "send"
    page.press(TAB)
    assert page.run("return document.activeElement.tagName") == "SUMMARY"
    page.press(TAB)
    assert page.run("return document.activeElement.id") == "argument-temperature"
    unnamed = (
        "return [...document.querySelectorAll('input, textarea, select, button')]"
        ".filter((e) => !e.labels?.length && !e.innerText && !e.textContent).map((e) => e.id)"
    )
    assert page.run(unnamed) == []
    page.run("document.querySelector('input[name=mode]:checked').focus()")
    page.press(RIGHT)
    assert page.text("#empty-title") == "Have the model go on with a text"
    page.press(ESCAPE)  # stops nothing, and breaks nothing


@needs_browser
def test_a_phone_has_room_for_it_and_dark_is_dark(page: Browser) -> None:
    page.resize(375, 700)
    wide = "return document.documentElement.scrollWidth"
    assert not page.is_shown("#panel")
    page.click("#panel-toggle")
    assert page.is_shown("#argument-temperature")
    assert page.run(wide) == 375
    set_argument(page, "top_k", "1")
    page.click("#panel-toggle")
    page.type("#input", PARIS)
    page.click("#send")
    finish(page)
    assert "Paris" in page.text(".answer .text")
    assert page.run(wide) == 375
    bottom = page.run("return document.querySelector('.composer').getBoundingClientRect().bottom")
    assert bottom <= 700
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.prefer("dark")
    assert page.run(colour) != light
