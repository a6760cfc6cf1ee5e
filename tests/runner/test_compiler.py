import jax
import pytest

from hex_llm import build
from hex_llm.config import Config
from hex_llm.parallel.mesh import make_mesh
from hex_llm.runner.compiler import DoesNotFit
from hex_llm.runner.memory import GIB, Memory
from hex_llm.runner.programs import Admit
from tests.checkpoints import write_llama


@pytest.fixture
def compiler(tmp_path):
    config = Config(model=str(write_llama(tmp_path)), compilation_cache_dir="", enable_jit=False)
    model, mesh = build.find_model(config), make_mesh(1)
    return build.plan_memory(config, model, mesh, build.make_buckets(config, model, mesh), Memory(GIB, 0)).compiler


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM.\nA table follows.", DoesNotFit),
        ("INTERNAL: Mosaic failed to compile.", jax.errors.JaxRuntimeError),
    ],
)
def test_what_the_compiler_finds_too_large_is_told_apart_and_in_one_line(compiler, monkeypatch, said, error):
    def refuse(lowered, **options):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(error) as raised:
        compiler.memory(Admit())
    assert type(raised.value) is error
    if error is DoesNotFit:
        assert str(raised.value).endswith("The compiler says: RESOURCE_EXHAUSTED: Ran out of memory on HBM.")
