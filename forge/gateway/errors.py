"""Errors in OpenAI's shape: one class, one JSON body, never a traceback."""

from __future__ import annotations

import json
import math

from forge.gateway.backend import Overloaded, UnknownTrajectoryError
from forge.rollout.engine import EngineError


class ApiError(Exception):
    """An answer that is not a completion. `param` names the offending field, `code` is what programs test."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After in whole seconds as HTTP wants it, and in milliseconds as the OpenAI SDK prefers it."""
        if self.retry_after_s is None:
            return []
        seconds = max(1, math.ceil(self.retry_after_s))
        millis = max(1, math.ceil(self.retry_after_s * 1000))
        return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % millis)]


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the request is at fault; `param` says where."""
    return ApiError(400, message, param=param, code=code)


def too_long(prompt_tokens: int, max_context: int) -> ApiError:
    """The wording agents look for before they compact."""
    message = (
        f"This model's maximum context length is {max_context} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens. Please reduce the length of the messages."
    )
    return invalid("messages", message, "context_length_exceeded")


def from_backend(error: Exception) -> ApiError | None:
    """What a backend's exception means to a client; None for what is our own fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnknownTrajectoryError):
        return ApiError(404, "No live trajectory has this id.", code="trajectory_not_found")
    if isinstance(error, Overloaded):
        message = f"Overloaded; retry after {error.retry_after_s:g} s."
        return ApiError(429, message, code="overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, EngineError):
        return invalid(None, str(error))
    return None
