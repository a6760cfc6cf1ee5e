"""Every way hex-llm can say no.

* HexError
  x StartError              nothing is served; the process ends with `exit_code`
    - ConfigError           flags contradict each other, the model or the machine       exit 2
    - CheckpointError       the model's files are missing, damaged or of another shape  exit 3
    - OutOfMemory           the model and its KV cache do not fit the device            exit 4
    - DeviceBusy            another process has the device                              exit 4
    - PortError             the address cannot be listened on                           exit 5
    - DownloadError         the model's files cannot be had from where they are         exit 6
      . NoSpace             the disk has no room for them
  x RequestError            the client's fault                                          4xx
  x ServerError             ours, or nobody's                                           5xx
    - NumericalError        the model produced no usable number for one request         500
    - EngineDead            a step failed or the process went, so that there is no engine
    - Unavailable           not now: starting, draining, too long in the queue          503
    - AdapterUnavailable    not now: the adapter's files cannot be had                  503

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


class DeviceBusy(StartError):
    exit_code = 4


class PortError(StartError):
    exit_code = 5


class DownloadError(StartError):
    """`status` is the HTTP status that the other side refused with, where it did."""

    exit_code = 6

    def __init__(self, message: str, *, status: int | None = None):
        super().__init__(message)
        self.status = status


class NoSpace(DownloadError):
    pass


class RequestError(HexError):
    """`param` names the field, `code` is for programs to tell errors apart."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code or type(self).code


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class AdapterError(RequestError):
    """The files of an adapter are none of a LoRA for this model."""

    code = "adapter_invalid"


class AdapterNotAllowed(RequestError):
    status = 403
    code = "adapter_not_allowed"


class ChatTemplateMissing(RequestError):
    code = "chat_template_missing"


class Unsupported(RequestError):
    """A field that is known, and whose part does not exist."""

    code = "unsupported_parameter"


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class AdapterNotFound(NotFound):
    code = "adapter_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


class TooLarge(RequestError):
    status = 413
    code = "content_too_large"


class WrongMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class Overloaded(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "server_overloaded"


class HeadersTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class ServerError(HexError):
    status = 500
    type = "server_error"
    code = "internal_error"
    param: str | None = None


class NumericalError(ServerError):
    code = "numerical_error"


class EngineDead(ServerError):
    """`__cause__` is what a step failed with, where that is known. A request under way is answered with 500; one that
    comes later, with 503.
    """

    code = "engine_dead"

    def __init__(self, message: str, *, status: int = 503):
        super().__init__(message)
        self.status = status


class AdapterUnavailable(ServerError):
    """Not now: what has the adapter does not answer, or the disk has no room for it."""

    status = 503
    code = "adapter_unavailable"


class BlocksLost(EngineDead):
    """The engine that goes on with a request cannot have what the one before it has computed."""


class Unavailable(ServerError):
    """`code` is one of starting, draining, queue_timeout, server_shutdown, too_many_connections."""

    status = 503

    def __init__(self, message: str, *, code: str):
        super().__init__(message)
        self.code = code


def told_error(message: str, code: str | None, status: int, *, param: str | None = None) -> RequestError | ServerError:
    """The error that another thread or process has told of by these."""
    adapters = (AdapterError, AdapterNotAllowed, AdapterNotFound, AdapterUnavailable)
    kind = next((each for each in adapters if each.code == code), RequestError if status < 500 else ServerError)
    if issubclass(kind, RequestError):
        error = kind(message, param=param, code=code)
    else:
        error = kind(message)
        error.code = code or error.code
    error.status = status
    return error
