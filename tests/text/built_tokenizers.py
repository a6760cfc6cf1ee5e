"""Small tokenizers of every kind that the models use, made on the spot."""

import functools

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from hex_llm.text.tokenizer import Tokenizer

TEXT = (
    "Once upon a time, in a small village, there lived a girl. She said: hello world! The answer is 42.\n\n"
    "Le café est très bon, naïve façade. Привет, мир! 你好世界,今天天气很好。こんにちは。 🚀🌍👩‍👩‍👧 ok.\n"
    "def main():\n    return {'a': [1, 2, 3]}\n\tended the end. ### Stop. <b>bold</b>  two spaces   three\r\n"
)
WORDS = ["a", "b", "the", "end", "end.", "stop", "ping", "he", "llo", "world", "é", "你", "好", "\n", ".", ","]


def wrap(tokenizer: RustTokenizer, **special: str) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))


def train_byte_level(vocab_size: int, special_tokens: list[str]) -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special_tokens,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    return wrap(train_byte_level(420, ["<s>", "</s>"]), bos_token="<s>", eos_token="</s>")


@functools.cache
def byte_level_with_added_tokens() -> Tokenizer:
    """As Llama 3 or Qwen, with added tokens that are not special, and some that look like bytes or hold spaces."""
    tokenizer = train_byte_level(330, ["<|begin|>", "<|end|>"])
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("sp ec 🚀", special=True)])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("é"), AddedToken("new line\n"), AddedToken("Ġ好")])
    return wrap(tokenizer, bos_token="<|begin|>", eos_token="<|end|>")


def byte_names() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def metaspace_names() -> list[str]:
    return ["▁", "▁▁", *WORDS, *("▁" + word for word in WORDS), "▁a▁", *sorted(set(TEXT) - set(WORDS) - {" "})]


def metaspace_bpe() -> RustTokenizer:
    names = ["<unk>", "<s>", "</s>", *byte_names(), *metaspace_names()]
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys(names))}
    tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def llama2() -> Tokenizer:
    """Metaspace and byte fallback; the first space of a text goes."""
    tokenizer = metaspace_bpe()
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens(["<tool>", " spaced "])
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def unigram() -> Tokenizer:
    """As Gemma: byte fallback, and every space stays."""
    names = ["<unk>", "<eos>", *byte_names(), *metaspace_names()]
    vocabulary = [(name, -float(place)) for place, name in enumerate(dict.fromkeys(names))]
    tokenizer = RustTokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return wrap(tokenizer, eos_token="<eos>", unk_token="<unk>")


@functools.cache
def metaspace() -> Tokenizer:
    """As T5 or Mistral of old: Metaspace's own decoder after byte fallback."""
    tokenizer = metaspace_bpe()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])  # pyright: ignore[reportAttributeAccessIssue]
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def word_piece() -> Tokenizer:
    names = ["[UNK]", "[SEP]", *WORDS, *("##" + word for word in WORDS), "don", "'", "t", "##n't"]
    tokenizer = RustTokenizer(models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return wrap(tokenizer, eos_token="[SEP]", unk_token="[UNK]")


@functools.cache
def word_ends() -> Tokenizer:
    """A decoder whose last token reads otherwise than one in the middle."""
    names = ["<unk>", *WORDS, *(word + "</w>" for word in WORDS)]
    tokenizer = RustTokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.BPEDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<unk>"])
    return wrap(tokenizer, unk_token="<unk>", eos_token="<unk>")


class PythonTokenizer(PreTrainedTokenizer):
    """A slow tokenizer: bytes by their two digits, and words by themselves with ▁ for a space, both ends stripped."""

    def __init__(self, **options):
        names = ["<unk>", "</s>", *byte_names(), *metaspace_names()]
        self.ids = {name: id for id, name in enumerate(dict.fromkeys(names))}
        self.names = list(self.ids)
        super().__init__(unk_token="<unk>", eos_token="</s>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def _tokenize(self, text, **options) -> list[str]:
        pieces = [[character] if character in self.ids else byte_spelling(character) for character in text]
        return [name for piece in pieces for name in piece]

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        spelled = [
            bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
            for name in tokens
        ]
        return b"".join(spelled).decode(errors="replace").strip()


def byte_spelling(character: str) -> list[str]:
    return ["▁"] if character == " " else [f"<0x{byte:02X}>" for byte in character.encode()]


@functools.cache
def python() -> Tokenizer:
    return Tokenizer(PythonTokenizer())


EXACT = (byte_level, byte_level_with_added_tokens, llama2, unigram, metaspace, word_piece)
WINDOWED = (word_ends, python)
