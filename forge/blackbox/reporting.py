"""Tells a gateway that nobody here runs how a trajectory ended."""

from __future__ import annotations

import httpx

from forge.blackbox.launcher import Gateway
from forge.gateway.report import REASONS
from forge.types import DeathReason, ForgeError, Json, Outcome


async def tell(gateway: Gateway, outcome: Outcome) -> None:
    """Once; a trajectory that never asked for anything is unknown there, and nothing is told. Raises ForgeError."""
    url = f"{gateway.url}/t/{outcome.trajectory}/report"
    headers = {"Authorization": f"Bearer {gateway.key}"}
    try:
        async with httpx.AsyncClient(timeout=10.0) as client:
            answer = await client.post(url, json=told(outcome), headers=headers)
    except httpx.HTTPError as error:
        raise ForgeError(f"{url}: {error or type(error).__name__}; is the gateway up?") from None
    if answer.status_code not in (200, 404):
        raise ForgeError(f"{url}: {answer.status_code} {answer.text[:200]}")


def told(outcome: Outcome) -> Json:
    """The body of a report."""
    if outcome.reward is not None:
        return {"reward": outcome.reward, "ended": True}
    reason = outcome.reason if outcome.reason in REASONS else DeathReason.AGENT_CRASH
    return {"reason": str(reason), "detail": outcome.detail, "ended": True}
