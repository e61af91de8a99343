"""Errors in the shape of Anthropic's Messages API."""

from __future__ import annotations

from forge.gateway.errors import ApiError, TooLong
from forge.types import Json

OVERLOADED = 529
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def anthropic_error(error: ApiError) -> tuple[int, Json]:
    """(status, body). A server that cannot answer now is "overloaded" here, with a status of its own."""
    status = OVERLOADED if error.status == 503 else error.status
    kind = _KINDS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    message = error.message
    if isinstance(error, TooLong):  # what this protocol's agents look for before they compact
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.max_context} maximum"
    return status, {"type": "error", "error": {"type": kind, "message": message}}
