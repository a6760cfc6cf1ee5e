import subprocess
import sys


def test_the_engine_needs_no_transformers_and_no_tokenizer():
    code = (
        "import sys\n"
        "from hex_llm.build import build_engine, find_model\n"
        "from hex_llm.config import Config\n"
        "config = Config(warmup=False, num_blocks=64, compilation_cache_dir='')\n"
        "build_engine(config, find_model(config))\n"
        "found = {'transformers', 'tokenizers', 'torch', 'scipy'} & sys.modules.keys()\n"
        "sys.exit(' '.join(found) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
