"""Every way hex-llm can say no.

* HexError
  x StartError              nothing is served; the process ends with `exit_code`
    - ConfigError           flags contradict each other, the model or the machine       exit 2
    - CheckpointError       the model's files are missing, damaged or of another shape  exit 3
    - OutOfMemory           the model and its KV cache do not fit the device            exit 4
  x RequestError            the client's fault                                          4xx
    - ContextTooLong
    - ChatTemplateMissing
  x NumericalError          the model produced no usable number for one request         500
  x EngineDead              a step failed, so that the engine does no more              503

A message is one sentence or two for the person who reads it: it names the value and the limit.
"""


class HexError(Exception):
    """Base of the package's errors."""


class StartError(HexError):
    exit_code = 1


class ConfigError(StartError):
    exit_code = 2


class CheckpointError(StartError):
    exit_code = 3


class OutOfMemory(StartError):
    exit_code = 4


class RequestError(HexError):
    status = 400
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class ChatTemplateMissing(RequestError):
    code = "chat_template_missing"


class NumericalError(HexError):
    status = 500
    code = "numerical_error"


class EngineDead(HexError):
    """`__cause__` is what the step failed with."""

    status = 503
    code = "engine_dead"
