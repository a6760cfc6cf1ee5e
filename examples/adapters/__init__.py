"""Two LoRA adapters for the embedded model: what they teach it, how they are trained, how they are measured."""
