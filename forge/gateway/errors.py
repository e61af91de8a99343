"""What went wrong with a request, in no protocol's words yet, and OpenAI's shape of it."""

from __future__ import annotations

import logging
import math

from forge.gateway.backend import Overloaded, UnknownTrajectoryError
from forge.gateway.budget import BudgetSpent
from forge.rollout.engine import EngineError
from forge.types import Json

logger = logging.getLogger(__name__)


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

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After in whole seconds as HTTP wants it, and in milliseconds as the SDKs prefer it."""
        if self.retry_after_s is None:
            return []
        seconds = max(1, math.ceil(self.retry_after_s))
        millis = max(1, math.ceil(self.retry_after_s * 1000))
        return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % millis)]


class TooLong(ApiError):  # noqa: N818 - a state, not a fault
    """The prompt leaves no room for an answer. Agents look for the very words of their protocol before they compact."""

    def __init__(self, prompt_tokens: int, max_context: int) -> None:
        message = (
            f"This model's maximum context length is {max_context} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages."
        )
        super().__init__(400, message, param="messages", code="context_length_exceeded")
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the request is at fault; `param` says where."""
    return ApiError(400, message, param=param, code=code)


def openai_error(error: ApiError) -> tuple[int, Json]:
    """(status, body) in OpenAI's shape, for all of its protocols."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status)
    kind = kind or ("server_error" if error.status >= 500 else "invalid_request_error")
    told = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return error.status, {"error": told}


def as_api_error(error: Exception) -> ApiError:
    """The client's view of any failure; our own faults are logged here and shown without details."""
    answer = from_backend(error)
    if answer is None:
        logger.error("gateway: a request failed", exc_info=error)
        answer = ApiError(500, "The server had an error while processing your request.", code="internal_error")
    return answer


def from_backend(error: Exception) -> ApiError | None:
    """What a backend's exception means to a client; None for what is our own fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnknownTrajectoryError):
        return ApiError(404, "No live trajectory has this id.", code="trajectory_not_found")
    if isinstance(error, Overloaded):
        message = f"Overloaded: please try again in {error.retry_after_s:g}s."  # one agent reads the time from it
        return ApiError(429, message, code="overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, BudgetSpent):
        return invalid(None, str(error), "budget_spent")
    if isinstance(error, EngineError):
        return invalid(None, str(error))
    if isinstance(error, RecursionError):
        return invalid(None, "The request is nested too deeply.")
    return None
