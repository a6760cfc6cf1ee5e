"""Tokens of one request to text, a few at a time: whole characters only, ending before a stop string.

The deltas, put together, are the decode of all tokens, cut at the first stop string that is completed. Every token
costs the same, however long the text has become.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence

from hex_llm.errors import RequestError
from hex_llm.text.tokenizer import REPLACEMENT, Joining, Tokenizer

# How many tokens may have no text yet at the start, and how many may wait for the ones that follow, before the
# window of an unknown decoder moves on.
_MAX_HEAD = 8
_MAX_WINDOW = 64

# Some text, and how many tokens had to come for it.
type Segment = tuple[int, str]


class Detokenizer:
    """The text of a request so far, less what may yet become something else.

    `stop_reason` is the stop string that ended the text. `num_tokens` counts the tokens that came, up to the one
    that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        if "" in stop:
            raise RequestError("stop holds an empty string, which would end every text.", param="stop")
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._text = _TEXTS[tokenizer.joining](tokenizer)
        self._stops = [_Stop(text) for text in dict.fromkeys(stop)]
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens  # a stop string completed by the first of them is text like any other
        self._held = ""
        self.num_tokens = 0
        self.stop_reason: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make final."""
        if not self._stops and len(token_ids) == 1:  # as it mostly is, for every token of every stream
            self.num_tokens += 1
            if token_ids[0] in self._skipped:
                return ""
            segments = self._text.push(token_ids[0], self.num_tokens)
            return segments[0][1] if len(segments) == 1 else "".join(text for _, text in segments)
        return "".join(self._push(token_ids))

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        if self.stop_reason is not None:
            return ""
        rest = "".join(self._release(self._text.finish(self.num_tokens))) + self._held
        self._held = ""
        return rest

    def _push(self, token_ids: Iterable[int]) -> Iterator[str]:
        for token in token_ids:
            if self.stop_reason is not None:
                return
            self.num_tokens += 1
            if token not in self._skipped:
                yield from self._release(self._text.push(token, self.num_tokens))

    def _release(self, segments: Iterable[Segment]) -> Iterator[str]:
        for num_tokens, text in segments:
            yield self._cut(text, num_tokens) if self._stops else text
            if self.stop_reason is not None:
                return

    def _cut(self, text: str, num_tokens: int) -> str:
        """What of the held text and `text` can be shown: a stop string, or a beginning of one at the end, cannot."""
        shown = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            completed = [stop.text for stop in self._stops if stop.advance(character)]
            if completed and num_tokens > self._min_tokens:
                self.stop_reason = max(completed, key=len)
                self.num_tokens = num_tokens
                self._held = ""
                return shown[: end if self._include_stop else end - len(self.stop_reason)]
        # A stop string that is shown in the end need not be held.
        held = 0 if self._include_stop else max(stop.matched for stop in self._stops)
        self._held = shown[len(shown) - held :]
        return shown[: len(shown) - held]


class _Stop:
    """A stop string, and how much of it the text now ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        # For each beginning of the stop string: the longest shorter one that it ends with.
        self._borders = [0]
        for character in text[1:]:
            border = self._borders[-1]
            while border and text[border] != character:
                border = self._borders[border - 1]
            self._borders.append(border + (text[border] == character))

    def advance(self, character: str) -> bool:
        """Takes the text's next character; True where it completes the stop string."""
        matched = self.matched
        while matched and self.text[matched] != character:
            matched = self._borders[matched - 1]
        matched += self.text[matched] == character
        completed = matched == len(self.text)
        self.matched = self._borders[-1] if completed else matched
        return completed


class _BytesText:
    """Tokens that are bytes: held until a character is whole or cannot become so."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int, num_tokens: int) -> Sequence[Segment]:
        text = self._decoder.decode(self._token_bytes(token))
        return ((num_tokens, text),) if text else ()

    def finish(self, num_tokens: int) -> Iterable[Segment]:
        return ((num_tokens, self._decoder.decode(b"", final=True)),)


class _PiecesText:
    """Tokens that are text, all but the first whatever came before; byte tokens are held until their run ends.

    One byte that fits nowhere makes every byte of its run a replacement character, however far back, so that no
    character of a run is sure before the run has ended.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._head: list[int] = []  # the tokens of a text that is still empty
        self._begun = False
        self._run: list[int] = []
        self._run_bytes: list[tuple[int, int]] = []  # number of tokens, byte

    def push(self, token: int, num_tokens: int) -> Sequence[Segment]:
        if self._tokenizer.token_name(token) is None:
            return ()
        byte = self._tokenizer.byte_token(token)
        if byte is not None:
            self._run.append(token)
            self._run_bytes.append((num_tokens, byte))
            return ()
        ended = self._end_run() if self._run else []
        text = self._tokenizer.piece(token) if self._begun else self._begin([token])
        return [*ended, (num_tokens, text)]

    def finish(self, num_tokens: int) -> Iterable[Segment]:
        return self._end_run() if self._run else ()

    def _begin(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode([*self._head, *tokens], skip_special_tokens=False)
        self._begun = text != ""
        if len(self._head) < _MAX_HEAD:
            self._head += tokens
        return text

    def _end_run(self) -> list[Segment]:
        text = self._tokenizer.decode_after_spacer(self._run) if self._begun else self._begin(self._run)
        segments = _spread(text, self._run_bytes)
        self._run, self._run_bytes = [], []
        return segments


def _spread(text: str, run: Sequence[tuple[int, int]]) -> list[Segment]:
    """A run's text by the tokens that completed its characters."""
    try:
        bytes(byte for _, byte in run).decode()
    except UnicodeDecodeError:
        segments = [(num_tokens, REPLACEMENT) for num_tokens, _ in run]
    else:
        decoder = codecs.getincrementaldecoder("utf-8")()
        segments = [(num_tokens, decoder.decode(bytes([byte]))) for num_tokens, byte in run]
    characters = [(num_tokens, character) for num_tokens, part in segments for character in part]
    # At the start of a text a decoder may have taken a space away.
    return characters[len(characters) - len(text) :]


class _WindowText:
    """Tokens of a decoder nothing is known about, decoded with and without an ordinary token behind them.

    What both have in common is final. Once they differ by nothing but that token, decoding starts afresh.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._spacer = tokenizer.spacer
        self._after_spacer = len(tokenizer.decode_after_spacer([self._spacer]))
        self._spacer_length = len(self._decode([self._spacer], skip_special_tokens=False))
        self._tokens: list[int] = []
        self._num_shown = 0  # characters of the window's text
        self._begun = False

    def push(self, token: int, num_tokens: int) -> Sequence[Segment]:
        self._tokens.append(token)
        alone = self._decode(self._tokens, skip_special_tokens=False)
        followed = self._decode([*self._tokens, self._spacer], skip_special_tokens=False)
        followed = followed[: len(followed) - self._after_spacer]
        if not alone and not self._begun:
            if len(self._tokens) > _MAX_HEAD:
                self._tokens.pop()
            return ()
        settled = alone == followed and not alone.endswith(REPLACEMENT)
        if settled or len(self._tokens) > _MAX_WINDOW:
            text = followed[self._num_shown :]
            self._begun = True
            self._tokens, self._num_shown = [self._spacer], self._spacer_length
        else:
            sure = _common(alone, followed)
            text = followed[self._num_shown : sure].rstrip(REPLACEMENT)
            self._num_shown += len(text)
        return ((num_tokens, text),)

    def finish(self, num_tokens: int) -> Iterable[Segment]:
        return ((num_tokens, self._decode(self._tokens, skip_special_tokens=False)[self._num_shown :]),)


def _common(first: str, second: str) -> int:
    """The length of the beginning that two texts share."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


_TEXTS = {Joining.BYTES: _BytesText, Joining.PIECES: _PiecesText, Joining.WINDOW: _WindowText}
