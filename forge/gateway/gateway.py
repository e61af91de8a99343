"""The gateway proper: turns a checked request of a trajectory into a generation, new or joined. No HTTP here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from forge.gateway.backend import Backend
from forge.gateway.chat import ChatCodec
from forge.gateway.chat_template import ChatError
from forge.gateway.choices import Choices
from forge.gateway.errors import ApiError, TooLong, invalid
from forge.gateway.generation import Asked, Generation, Job, Linked
from forge.gateway.reading import ReplyReader
from forge.gateway.recovery import Conversations, Fork
from forge.gateway.report import Report
from forge.gateway.request import Constrain, RawPrompt, Request
from forge.gateway.retries import Key, Retries, Ticket
from forge.gateway.watch import Watch
from forge.rollout.engine import Sampling
from forge.types import Completion

#: generations one request may ask for
MOST_CHOICES = 128
#: trajectories whose last report is remembered once they are over
REMEMBERED = 10_000


class Gateway:
    """State of one gateway: open generations by trajectory and body, and of every trajectory its completions' tree.

    A turn that goes on from a reply repeats the very ids that the engine saw and sampled; only what follows is
    tokenised.

    `pin_sampling`: temperature, top_p and seed come from the backend whatever the client asks, and the backend's
    max_tokens is a ceiling. Training needs it, because a record tells the temperature but no top_p.
    `constrain`: how the engine keeps a reply to a constraint (a forced call, JSON). Without it none is kept, and
    every reply to a request that asked for one says so.
    """

    def __init__(
        self,
        backend: Backend,
        codec: ChatCodec,
        *,
        pin_sampling: bool,
        retry_grace_s: float,
        constrain: Constrain | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.backend = backend
        self.codec = codec
        self._pin = pin_sampling
        self._constrain = constrain
        self._retries: Retries[Choices] = Retries(retry_grace_s)
        self._completions: Counter[str] = Counter()
        self._trees: dict[str, Conversations] = {}
        self._reports: dict[str, Report] = {}
        self._over: dict[str, Report] = {}  # of trajectories that a report has ended, the newest
        self.watch = watch or Watch()

    def join(self, key: Key) -> Ticket[Choices] | None:
        """For a marked retry: the generations whose answer was lost, if there are any."""
        return self._retries.join(key)

    def start(self, key: Key, request: Request, defaults: Sampling, *, is_sub_agent: bool = False) -> Ticket[Choices]:
        """New samples for `key`'s trajectory. Raises ApiError for what cannot be rendered or does not fit."""
        self._over.pop(key[0], None)  # a backend that lets it begin anew
        prompts, asked = self._asked(key[0], request, is_sub_agent=is_sub_agent)
        longest = max(map(len, prompts))
        room = self.backend.max_context - longest
        if room < 1:
            raise TooLong(longest, self.backend.max_context)
        sampling, unkept = self._constrained(request, prompts[0], self._sampling(request, defaults, room))
        jobs = [
            self._job(key[0], request, asked, prompt, sampling, nth) for prompt in prompts for nth in range(request.n)
        ]
        generations = [Generation(self.backend, job, self._link, self._record) for job in jobs]
        return self._retries.add(key, Choices(generations, unkept))

    def count(self, request: Request) -> int:
        """Tokens of the prompts. Raises ApiError for what cannot be rendered."""
        return sum(map(len, self._prompts(request)))

    def leave(self, ticket: Ticket[Choices], *, delivered: bool, may_retry: bool) -> None:
        """A waiter is gone, with its answer or without."""
        self._retries.leave(ticket, delivered=delivered, may_retry=may_retry)

    def forget(self, trajectory: str) -> None:
        """The trajectory is over: cancel what it still generates, drop its tree and what was reported."""
        self.watch.trajectory_ended()
        self._retries.forget(trajectory)
        self._reports.pop(trajectory, None)
        self._completions.pop(trajectory, None)
        self._trees.pop(trajectory, None)

    def report(self, trajectory: str, part: Report) -> Report:
        """Take a part of a report; returns all that was said of the trajectory so far. Once that has ended it, the same
        part again changes nothing, and another is refused. Raises ApiError, UnknownTrajectoryError."""
        over = self._over.get(trajectory)
        if over is not None:
            if over.joined(part) == over:
                return over
            raise ApiError(409, "This trajectory is over, and something else was reported.", code="trajectory_over")
        whole = self._reports.get(trajectory, Report()).joined(part)
        self.backend.report(trajectory, whole)
        if whole.ended:
            self._over[trajectory] = whole
            for name in list(self._over)[: len(self._over) - REMEMBERED]:
                del self._over[name]
        else:
            self._reports[trajectory] = whole
        return whole

    def tree(self, trajectory: str) -> Conversations:
        """Of a trajectory that is not over: its completions so far."""
        return self._trees.setdefault(trajectory, Conversations())

    def close(self) -> None:
        """Cancel every generation."""
        self._retries.close()

    def _asked(
        self, trajectory: str, request: Request, *, is_sub_agent: bool
    ) -> tuple[list[tuple[int, ...]], Asked | None]:
        """The prompts; and of a conversation where it belongs, its earlier turns in the ids they had."""
        if request.prompts or request.n > MOST_CHOICES:
            return self._prompts(request), None
        tree, messages, tools = self.tree(trajectory), request.messages, request.tools
        place = tree.place(messages, tools)
        asked = Asked(messages=messages, tools=tools, place=place, fork=None, is_sub_agent=is_sub_agent)
        if place.parent is None:
            return self._prompts(request), asked
        node, fork = tree.nodes[place.parent], Fork.STOP
        if node.sampled_ids and not node.cut:
            before, after = messages[: place.known], messages[place.known :]
            try:
                rest = self.codec.continuation(before, after, tools, node.sampled_ids[-1])
            except ChatError as error:
                raise invalid("messages", str(error)) from error
            if rest is not None:
                return [node.prompt_ids + node.sampled_ids + rest], asked
            fork = Fork.TEMPLATE
        return self._prompts(request), replace(asked, fork=fork)

    def _prompts(self, request: Request) -> list[tuple[int, ...]]:
        try:
            if request.prompts:
                prompts = [self._raw(prompt) for prompt in request.prompts]
            else:
                # Tools stay in the prompt under tool_choice "none", so that such a turn still extends the last one.
                prompts = [self.codec.prompt(request.messages, request.tools)]
        except ChatError as error:
            raise invalid("prompt" if request.prompts else "messages", str(error)) from error
        if len(prompts) * request.n > MOST_CHOICES:
            raise invalid("n", f"{len(prompts)} prompts times n = {request.n}: at most {MOST_CHOICES} at once.")
        return prompts

    def _raw(self, prompt: RawPrompt) -> tuple[int, ...]:
        ids = self.codec.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid("prompt", "The prompt is empty: there is nothing to continue.")
        return ids

    def _job(
        self,
        trajectory: str,
        request: Request,
        asked: Asked | None,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        nth: int,
    ) -> Job:
        """The `nth` sample of a prompt; a seed that was asked for becomes another with each."""
        reader = ReplyReader(
            self.codec.decode,
            request.stop,
            self.codec.tool_stream(asked.tools if asked else ()) if request.calls_allowed else None,
            None if request.prompts else self.codec.reasoning_stream(prompt_ids),
            one_call=request.calls_allowed and not request.parallel_calls,
        )
        if nth and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + nth)
        return Job(
            asked=asked,
            trajectory=trajectory,
            prompt_ids=prompt_ids,
            sampling=sampling,
            reader=reader,
            live=request.stream or reader.may_stop,
        )

    def _sampling(self, request: Request, defaults: Sampling, room: int) -> Sampling:
        limit = request.max_tokens or defaults.max_tokens
        pinned = self._pin
        return Sampling(
            max_tokens=min(limit, room, defaults.max_tokens) if pinned else min(limit, room),
            temperature=_choose(None if pinned else request.temperature, defaults.temperature),
            top_p=_choose(None if pinned else request.top_p, defaults.top_p),
            stop_ids=tuple(dict.fromkeys(defaults.stop_ids + self.codec.stop_ids)),
            seed=defaults.seed if pinned or request.seed is None else request.seed,
        )

    def _constrained(
        self, request: Request, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> tuple[Sampling, tuple[str, ...]]:
        """The sampling that keeps what can be kept, and the fields that are not. A forced call comes first in
        `constraints`, and is no content whose format a second one could ask for."""
        unkept = list(request.overlooked)
        for constraint in request.constraints:
            if sampling.grammar is not None:
                break
            grammar = self._constrain(constraint, request, prompt_ids) if self._constrain else None
            if grammar is None:
                unkept.append(constraint.field)
            else:
                sampling = replace(sampling, grammar=grammar)
        return sampling, tuple(unkept)

    def _link(self, generation: Generation) -> Linked:
        """Give a completion that is about to be recorded its number and its place in the tree."""
        job = generation.job
        index = self._completions[job.trajectory]
        self._completions[job.trajectory] = index + 1
        tree = self._trees.get(job.trajectory)
        if job.asked is None or tree is None:
            return Linked(index)
        known = Counter(tree.echoes)
        fork = tree.add(
            index,
            job.asked.place,
            job.asked.messages,
            job.asked.tools,
            reply=generation.message,
            prompt_ids=job.prompt_ids,
            sampled_ids=tuple(generation.sampled_ids),
            cut=generation.stop_string is not None,
            known_fork=job.asked.fork,
            is_sub_agent=job.asked.is_sub_agent,
        )
        return Linked(index, job.asked.place.parent, None if fork is None else fork.value, tree.echoes - known)

    def _record(self, generation: Generation, completion: Completion) -> None:
        assert generation.linked is not None
        self.watch.completed(completion, generation.malformed, generation.linked.echoes)
        self.backend.record(completion)


def _choose(asked: float | None, default: float) -> float:
    return default if asked is None else asked
