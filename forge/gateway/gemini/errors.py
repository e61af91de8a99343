"""Errors in the shape of Google's APIs."""

from __future__ import annotations

from forge.gateway.errors import ApiError, TooLong
from forge.types import Json

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


def gemini_error(error: ApiError) -> tuple[int, Json]:
    """(status, body). This protocol's clients read the time to wait from the body."""
    message = error.message
    if isinstance(error, TooLong):
        message = (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed "
            f"({error.max_context})."
        )
    name = _STATUS.get(error.status) or ("INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    told: Json = {"code": error.status, "message": message, "status": name}
    if error.retry_after_s is not None:
        wait = f"{error.retry_after_s:.3f}s"
        told["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": wait}]
    return error.status, {"error": told}
