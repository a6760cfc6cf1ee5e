"""Models whose folders are set with traps (F21): no code of theirs runs, and nothing is opened that could hold some.

Every process of a real server tells of what it opens, compiles, runs and imports (`audited/sitecustomize`).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from tests.checkpoints import CHAT_TEMPLATE, write_llama
from tests.faults.crowd import crowding
from tests.faults.oracles import check_oracles
from tests.faults.starts import refused
from tests.faults.suite import record, sized
from tests.server.servers import running_server

AUDITED = Path(__file__).parent / "audited"
TRAP = "sprung by a trap"  # as there
MODULES = {
    "config.json": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"},
    "tokenizer_config.json": {"AutoTokenizer": ["tokenizer.XTokenizer", "tokenizer.XTokenizer"]},
}
CODE = ("configuration_x.py", "modeling_x.py", "tokenizer.py", "__init__.py", "sitecustomize.py", "custom_generate.py")
PICKLES = ("pytorch_model.bin", "model.pt", "model.pth", "training_args.bin", "optimizer.ckpt", "state.pkl")
# Each asks for the program that makes the canary, by another way out of the sandbox; `{}` is a command.
ESCAPES = (
    "cycler.__init__.__globals__.os.system('{}')",
    "self.__init__.__globals__.__builtins__.__import__('os').system('{}')",
    "''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['sys'].modules['os'].system('{}')",
    "namespace.__init__.__globals__['os'].system('{}')",
    "raise_exception.__globals__.json.codecs.builtins.__import__('os').system('{}')",
    "strftime_now.__globals__['__builtins__']['__import__']('os').system('{}')",
    "('%s' | format | attr('format'))('{{0.__class__}}')",
    "'{{0.__class__.__init__.__globals__}}'.format(messages)",
    "(messages | map(attribute='__class__') | list)[0].__subclasses__()",
    "lipsum.__globals__['os'].popen('{}').read()",
)
LINKED = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
    "model.safetensors",
)  # fmt: skip
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@dataclass(frozen=True)
class Trapped:
    """A model's folder full of traps, and what shows whether one was sprung."""

    folder: Path
    canary: Path
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(AUDITED), os.environ.get("PYTHONPATH", ""))))
        return {"PYTHONPATH": path, "HEX_LLM_AUDIT": f"{self.folder}:{self.log}"}

    def told(self, kind: str) -> list[tuple[str, str]]:
        """What processes have told: which of them, and what."""
        lines = [line.split("\t") for line in self.log.read_text().splitlines()]
        return [(who, what) for told, who, what in lines if told == kind]


def write_trapped(folder: Path) -> Trapped:
    trapped = Trapped(folder, folder.parent / "canary", folder.parent / "told")
    write_llama(folder)
    command = f"touch {trapped.canary}"
    for name in CODE:
        classes = "class XConfig: pass\nclass XModel: pass\nclass XTokenizer: pass\n"
        (folder / name).write_text(f"# {TRAP}\nimport os\nos.system({command!r})\n{classes}")
    for name in PICKLES:
        (folder / name).write_bytes(f"cos\nsystem\n(S'{command}'\ntR.".encode())
    for name, modules in MODULES.items():
        fields = json.loads((folder / name).read_text()) | {"auto_map": modules, "trust_remote_code": True}
        (folder / name).write_text(json.dumps(fields))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"custom_generate": "./custom_generate.py"}))
    (folder / "passwords").symlink_to("/etc/passwd")
    (folder / "chat_template.jinja").write_text(_template(command))
    return trapped


def _template(command: str) -> str:
    """That tries one escape, or goes on for ever, where the first message asks for it."""
    cases = [(f"escape {number}", f"{{{{ {escape.format(command)} }}}}") for number, escape in enumerate(ESCAPES)]
    cases += [("endless", ENDLESS), ("refuse", "{{ raise_exception('Say please.') }}")]
    choices = "".join(f"{{% if messages[0].content == {said!r} %}}{does}{{% endif %}}" for said, does in cases)
    return choices + CHAT_TEMPLATE


def by_transformers(trapped: Trapped) -> None:
    """Leaves the tokenizer to transformers, by the class that auto_map names."""
    (trapped.folder / "tokenizer.json").unlink()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(("<pad>", "<s>", "</s>", *letters))}
    (trapped.folder / "vocab.json").write_text(json.dumps(vocabulary))
    (trapped.folder / "merges.txt").write_text("#version: 0.2\n")


@contextmanager
def unsprung(trapped: Trapped) -> Iterator[None]:
    """Nothing that a model may not do has been done when the body ends."""
    yield
    assert trapped.told("wrong") == []
    assert not trapped.canary.exists()


def say(content: str) -> dict:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


def chat(server, content: str) -> tuple[int, str, float]:
    started = time.monotonic()
    answer = server.post("/v1/chat/completions", say(content))
    return answer.status_code, answer.text, time.monotonic() - started


def test_a_server_springs_no_trap_of_its_model_and_survives_its_template(tmp_path):
    trapped = write_trapped(tmp_path / "model")
    with unsprung(trapped):
        with running_server(trapped.folder, tmp_path / "log", **trapped.environment) as server:
            assert chat(server, "hello")[0] == 200
            for number in range(len(ESCAPES)):
                status, text, _ = chat(server, f"escape {number}")
                assert (status, "The chat template" in text) == (400, True)
            status, text, _ = chat(server, "refuse")
            assert (status, "Say please." in text) == (400, True)
            slowest = 0.0
            for _ in range(sized(2, 20)):
                status, text, seconds = chat(server, "endless")
                assert (status, "took longer than 2 s" in text) == (400, True)
                assert seconds < 3 * crowding()
                slowest = max(slowest, seconds)
                assert server.get("/ping").status_code == 200
            assert chat(server, "hello")[0] == 200
            check_oracles(server)
        log = (tmp_path / "log").read_text()
    for part in ("hex_llm.server.api_server", "hex_llm.engine_process", "hex_llm.text.process"):
        assert any(part in who for who, _ in trapped.told("begun")), f"{part} was not watched"
    read = {Path(what).name for _, what in trapped.told("read")}
    assert {"config.json", "model.safetensors", "chat_template.jinja"} <= read
    assert read.isdisjoint({*CODE, *PICKLES, "passwords"})
    assert "root:" not in log
    traps = f"{len(CODE)} files of code, {len(PICKLES)} pickles and {len(ESCAPES)} escapes from the template's sandbox"
    record("F21", f"{traps}: none ran, none was opened; an endless template is a 400 after {slowest:.1f} s")


def run_audited(trapped: Trapped, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(trapped.folder)]
    environment = os.environ | trapped.environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


LOAD = """
import sys
from pathlib import Path
from hex_llm.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(Path(sys.argv[1]))
assert "transformers" in sys.modules
print(tokenizer.decode(tokenizer.encode("hello", False)))
"""


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "XTokenizer", None])
def test_a_tokenizer_that_transformers_reads_springs_no_trap(tokenizer_class, tmp_path):
    """Which is where others were led around trust_remote_code. It is read without the code, or refused."""
    trapped = write_trapped(tmp_path / "model")
    by_transformers(trapped)
    settings = trapped.folder / "tokenizer_config.json"
    fields = json.loads(settings.read_text()) | {"tokenizer_class": tokenizer_class}
    settings.write_text(json.dumps(fields))
    with unsprung(trapped):
        done = run_audited(trapped, LOAD)
    refusal = "CheckpointError" in done.stderr
    assert refusal or (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    record("F21", f"a tokenizer of {tokenizer_class} with code beside it is {'refused' if refusal else 'read without'}")


SPRING = {
    "pickle": "import pickle; pickle.load(open(sys.argv[1] + '/state.pkl', 'rb'))",
    "run": "exec(open(sys.argv[1] + '/tokenizer.py').read())",
    "import": "sys.path.insert(0, sys.argv[1]); import configuration_x",
    "open": "open(sys.argv[1] + '/pytorch_model.bin').close()",
    "marshal": "import marshal; marshal.loads(marshal.dumps(3))",
}


@pytest.mark.parametrize("trap", SPRING)
def test_a_trap_that_is_sprung_is_told_of(trap, tmp_path):
    """So that the tests above can fail."""
    trapped = write_trapped(tmp_path / "model")
    done = run_audited(trapped, f"import sys; {SPRING[trap]}")
    assert done.returncode == 0, done.stderr
    assert trapped.told("wrong")
    assert trapped.canary.exists() == (trap in ("pickle", "run", "import"))


def test_a_link_to_another_file_shows_nothing_of_it(tmp_path, capsys):
    secrets = [part for part in Path("/etc/passwd").read_text().split(":") if len(part) > 4]
    for name in LINKED:
        folder = write_llama(tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/etc/passwd")
        end = refused(capsys, str(folder), "--max_model_len=64")
        assert end.code == 3
        assert str(folder / name) in end.said
        assert not [part for part in secrets if part in end.said]
    record("F21", f"each of {len(LINKED)} files as a link to /etc/passwd: exit 3, without a word of it")
