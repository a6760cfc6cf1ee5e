"""Takes the pictures of docs/playground.md anew: python -m tests.server.screenshots"""

import tempfile
import time
from pathlib import Path

from tests.server.browser import ENTER, Browser, running_browser
from tests.server.servers import running_server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"
QUESTIONS = ("What is the capital of France?", "Count from 3 to 9.", "What day comes after Monday?")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    adapters = ",".join(f"{name}=examples/adapters/{name}" for name in ("shouting", "pirate"))
    flags = ("--max_model_len=1024", "--enable_prefix_cache_hbm", "--enable_lora", f"--lora_modules={adapters}")
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        # Padding of 32 so that short prompts have cached tokens to show.
        server = running_server(None, logs / "server", *flags, "--prefill_len_padding=32", small=False)
        with server as running, running_browser(logs / "browser") as browser:
            browser.open(running.url)
            take(browser)


def take(browser: Browser) -> None:
    browser.resize(1280, 860)
    browser.prefer("light")
    browser.wait(lambda: browser.text("#status") == "ready")
    browser.type("#argument-temperature", "0")
    for question in QUESTIONS:
        time.sleep(2)  # so that the drawing of throughput has hills
        browser.type("#input", question + ENTER)
        browser.wait(lambda: browser.is_shown("#send"), 60)
    time.sleep(2.5)
    browser.screenshot(FOLDER / "playground-light.png")
    browser.prefer("dark")
    browser.run(
        "for (const box of document.querySelectorAll('.panel details')) box.open = box.id === 'code-box' ||"
        " box.querySelector('#card') !== null"
    )
    browser.screenshot(FOLDER / "playground-dark.png")
    browser.prefer("light")
    browser.resize(375, 760)
    browser.screenshot(FOLDER / "playground-phone.png")
    browser.run("for (const box of document.querySelectorAll('.panel details')) box.open = box.id !== 'code-box'")
    browser.click("#panel-toggle")
    browser.screenshot(FOLDER / "playground-phone-settings.png")


if __name__ == "__main__":
    main()
