"""What one process answers: `alone.py FLAGS`, and bodies of completions as JSON on stdin; prints the texts as JSON."""

import json
import sys

from hex_llm import LLM, Config, SamplingParams

if __name__ == "__main__":
    llm = LLM(config=Config.from_args(sys.argv[1:]))
    bodies = json.load(sys.stdin)
    asked = [(body.pop("prompt"), body.pop("dynamic-lora", ""), SamplingParams(**body)) for body in bodies]
    prompts, adapters, sampling = zip(*asked, strict=True)
    results = llm.generate(prompts, sampling, adapter=adapters, progress=False)
    print(json.dumps([result.outputs[0].text for result in results]))
