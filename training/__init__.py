"""How the embedded default model is made: its data, its tokenizer, its training and its evaluation."""
