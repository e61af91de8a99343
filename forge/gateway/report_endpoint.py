"""POST /t/NAME/report: what its body may hold, and its answer. forge.gateway.report says what it means."""

from __future__ import annotations

from forge.gateway import fields, models, wire
from forge.gateway.errors import ApiError, as_api_error, invalid
from forge.gateway.fields import parse_body
from forge.gateway.gateway import Gateway
from forge.gateway.report import REASONS, Report, ToolRun
from forge.gateway.wire import Headers, Receive, Scope, Send
from forge.types import DeathReason, Json

_LARGE = 1e30


class ReportEndpoint:
    """POST /t/NAME/report: forge.gateway.report says what. Answered with all that was said of the trajectory so far."""

    def __init__(self, gateway: Gateway, *, max_body_bytes: int) -> None:
        self._gateway = gateway
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        with self._gateway.watch.request("report") as seen:
            try:
                body = await wire.read_body(headers, receive, self._max_body_bytes)
                seen.trajectory = wire.trajectory_of(scope, headers)
                whole = self._gateway.report(seen.trajectory, parse_report(parse_body(body)))
                await wire.send_json(send, 200, wire.dump(_shown(seen.trajectory, whole)))
            except wire.HungUp:
                seen.hung_up()
            except Exception as error:
                told = as_api_error(error)
                seen.status, seen.code = told.status, told.code
                await _refuse(send, told, scope, headers)


async def _refuse(send: Send, told: ApiError, scope: Scope, headers: Headers) -> None:
    status, body = models.error_shape(scope["path"], headers)(told)
    await wire.send_json(send, status, wire.dump(body), told.headers())


def _shown(trajectory: str, report: Report) -> Json:
    tools = [{"id": key, "seconds": run.seconds, "failed": run.failed} for key, run in report.tools.items()]
    return {
        "trajectory": trajectory,
        "reward": report.reward,
        "reward_parts": dict(report.reward_parts),
        "reason": report.reason,
        "detail": report.detail,
        "tools": tools,
        "ended": report.ended,
    }


def parse_report(data: Json) -> Report:
    """Raises ApiError naming the field at fault; fields that are not known are refused, as they would be lost."""
    for key in data:
        if key not in Report.__dataclass_fields__:
            raise invalid(key, f"{key} is no field of a report: {', '.join(Report.__dataclass_fields__)}.")
    reward, reason = fields.number(data, "reward", -_LARGE, _LARGE), fields.typed(data, "reason", str)
    if reason is not None and reason not in REASONS:
        raise invalid("reason", f"reason must be one of {', '.join(REASONS)}, not {reason!r}.")
    if reward is not None and reason is not None:
        raise invalid("reason", "A trajectory that died has no reward: give reward or reason.")
    parts = fields.typed(data, "reward_parts", dict) or {}
    return Report(
        reward=reward,
        reward_parts={name: _number(parts, name, "reward_parts", -_LARGE) for name in parts},
        reason=None if reason is None else DeathReason(reason),
        detail=fields.typed(data, "detail", str) or "",
        tools={fields.required(tool, "id", str, at): _tool(tool, at) for at, tool in fields.objects(data, "tools")},
        ended=fields.typed(data, "ended", bool) or False,
    )


def _tool(tool: Json, at: str) -> ToolRun:
    return ToolRun(_number(tool, "seconds", at, 0.0), fields.typed(tool, "failed", bool, at) or False)


def _number(data: Json, key: str, at: str, low: float) -> float:
    value = fields.number(data, key, low, _LARGE, at)
    if value is None:
        name = fields.inside(at, key)
        raise invalid(name, f"{name} must be a number.")
    return value
