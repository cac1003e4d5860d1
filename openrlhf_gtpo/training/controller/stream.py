"""A stream of prompts instead of a loop over rollouts (``--train.partial_rollout_enable``): engines sample all the
time, and weights change between two tokens of a response.

Engines pause during a transfer. After it, prompts are drawn until ``1 + (N + 1) // 2`` steps of them are in flight or
ready, with N = ``--train.max_staleness``. No group is trained on more than N steps after its request, and none is
dropped for its age: a step takes the groups that are complete first, but waits for a group that later steps could not
take any more. With 1 + N steps of prompts in flight that would be first in, first out; with fewer, short responses
overtake long ones.

The engines' thread collects answers under the lock of ``Engines.changed``. :meth:`still` takes the lock too, so that
nothing is drawn or asked while weights are sent or a checkpoint is written. The same holds
while that thread evaluates.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.controller.engines import Engines
from openrlhf_gtpo.training.controller.rollouts import IN_FLIGHT, LOADER, Rollouts
from openrlhf_gtpo.training.rollout.groups import Groups, Parts
from openrlhf_gtpo.training.rollout.packed import pack, pack_json, unpack, unpack_json
from openrlhf_gtpo.training.rows import Request, Rollout, Row
from openrlhf_gtpo.training.settings.run import steps_in_flight

_COUNTS = ("prompts", "tokens", "dropped")  # of the rollout for the next step
_LOOK_EVERY = 0.2  # seconds until the thread looks for new requests


@dataclass(eq=False)
class _Prompt:
    """A prompt that was drawn but not trained on yet."""

    request: Request
    episode: int
    version: int = 0  # of the weights at its request
    rows: list[Row] = field(default_factory=list)  # its group, once complete


class Stream(Rollouts):
    """The prompts in flight, and the groups that are ready.

    Args:
        sampler, loader, engines, may_sample_ahead: as for ``Rollouts``.
        max_staleness: maximum steps from the policy that sampled a token to the policy that trains on it.
    """

    def __init__(
        self, sampler: Any, loader: Any, engines: Engines, may_sample_ahead: Callable[[int], bool], max_staleness: int
    ) -> None:
        super().__init__(sampler, loader, engines, may_sample_ahead)
        self._max_staleness = max_staleness
        self._ahead = steps_in_flight(max_staleness) - 1
        self._prompts: dict[int, _Prompt] = {}  # all that were drawn but not trained on, by number
        self._complete: list[_Prompt] = []  # of these, prompts with rows, in order of completion
        self._groups: Groups | None = None  # requests to engines; made at the beginning
        self._episode = 0  # whose prompts are trained on
        self._drawing = 0  # whose prompts are drawn
        self._end = 0  # the first episode after the run
        self._next = Rollout([], 0, False)  # counts since the last step
        self._waited = 0.0  # seconds without an answer since weights were sent
        self._ended = False

    def begin(self, episode: int, end: int) -> None:
        """Begin, and ask again for the checkpoint's prompts in flight, which belong to the first episodes."""
        self._episode, self._drawing, self._end = episode, max(self._drawing, episode), end
        self._groups = Groups(self._sampler, self._sampler.training_params())
        for prompt in self._prompts.values():
            if not prompt.rows:
                self._ask(prompt)
        self._engines.ask(self._collect)

    def next(self) -> Rollout | None:
        """Return the next step's rollout of complete groups; an episode's last one has the rest. None if weights must
        be sent first.

        Raises:
            Exception: from the engines' thread.
        """
        engines = self._engines
        with engines.changed:
            if not (self.has_failed or engines.lack_weights):
                self._draw_ahead()  # the next episode, if the rest of the last one was filtered
                engines.changed.wait_for(lambda: self.has_failed or engines.lack_weights or self._chosen() is not None)
            if self._failure is not None:
                raise self._failure
            return None if engines.lack_weights else self._take()

    def drain(self) -> bool:
        """Wait for nothing: engines pause while weights are sent, and continue."""
        return True

    def weights_sent(self) -> bool:
        """Ask the engines for more."""
        if self._groups is not None:
            self._waited = 0.0
            self._draw_ahead()
        return True

    def still(self) -> AbstractContextManager[Any]:
        """Return a context in which no prompt is drawn and no engine is asked for a response to train on."""
        return self._engines.changed

    def is_moving(self, seconds: float) -> bool:
        return not self._groups or self._waited < seconds

    def end(self) -> None:
        """End: no step follows."""
        self._ended = True

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state: the place in the data, ready groups, prompts in flight, and the next step's
        counts."""
        in_flight = [prompt for prompt in self._prompts.values() if not prompt.rows]
        rows = [replace(row, label=None) for prompt in self._complete for row in prompt.rows]
        prompts = []
        for each in (*self._complete, *in_flight):
            request = each.request
            own = (request.prompt, request.label, request.number, each.episode, each.version, len(each.rows))
            prompts.append((*own, request.variables))
        # After too many failures, a resumed run may drop as many again: the cause may be repaired by then.
        seen = replace(self._next, dropped=0) if self.has_failed else self._next
        counts = [getattr(seen, name) for name in _COUNTS]
        kept = {"rows": pack(rows), "prompts": pack_json(prompts), "drawing": self._drawing, "counts": counts}
        return {LOADER: self._loader.state_dict(), IN_FLIGHT: kept}

    def restore(self, state: Mapping[str, Any]) -> int:
        kept = state.get(IN_FLIGHT)
        if kept is None:
            if super().restore(state):
                raise TrainingStopped(
                    "The checkpoint holds a rollout that was sampled ahead without --train.partial_rollout_enable; "
                    "leave that flag out to resume from it."
                )
            return 0
        rows = iter(unpack(kept["rows"]))
        for text, label, number, episode, version, count, *variables in unpack_json(kept["prompts"]):
            request = self._sampler.request((text, label, None), number)
            if variables:  # an earlier version's have none; today's template might make another text of the row
                request = request._replace(variables=variables[0])
            prompt = _Prompt(request, episode, version)
            prompt.rows = [next(rows) for _ in range(count)]
            self._prompts[number] = prompt
            if count:
                self._complete.append(prompt)
        self._drawing = kept["drawing"]
        for name, count in zip(_COUNTS, kept["counts"], strict=False):  # an earlier version had one more
            setattr(self._next, name, count)
        return len(self._prompts) + self._next.prompts

    def _draw_ahead(self) -> None:
        """Draw and ask for the next step, and for as many steps after it as features allow with these weights."""
        ahead, per_step, may_sample_ahead = 0, self._sampler.per_rollout, self._may_sample_ahead
        assert may_sample_ahead is not None
        while ahead < self._ahead and may_sample_ahead(ahead + 1):
            ahead += 1
        drawn = Counter(prompt.episode for prompt in self._prompts.values())
        while self._drawing < self._end:
            drawn[self._drawing] += 1
            if sum(-(-count // per_step) for count in drawn.values()) > 1 + ahead:  # no step mixes episodes
                break
            if not self._draw():
                drawn[self._drawing - 1] -= 1

    def _draw(self) -> bool:
        """Draw and ask for a prompt; False at the end of the episode."""
        request = self._sampler.draw()
        if request is None:
            self._drawing += 1
            return False
        prompt = self._prompts[request.number] = _Prompt(request, self._drawing)
        self._ask(prompt)
        return True

    def _ask(self, prompt: _Prompt) -> None:
        assert self._groups is not None
        prompt.version = self._engines.version
        self._groups.ask(prompt.request)

    def _chosen(self) -> list[_Prompt] | None:
        """Choose the next step's groups; None if it must wait for more."""
        version, episode, per_step = self._engines.version, self._episode, self._sampler.per_rollout
        ready = [prompt for prompt in self._complete if prompt.episode == episode]
        mine = [prompt for prompt in self._prompts.values() if prompt.episode == episode]
        size = min(per_step, len(mine)) if self._drawing > episode else per_step
        if len(ready) < size:
            return None
        chosen: dict[int, _Prompt] = {}
        for later in range(self._max_staleness + 1):
            # Groups up to version ``last`` must be taken within ``later`` more steps. These can take ``later *
            # per_step`` of them, so this step has to take the others.
            last = version + later - self._max_staleness
            due = min(sum(prompt.version <= last for prompt in mine) - later * per_step, size)
            for prompt in ready:
                if len(chosen) < due and prompt.version <= last:
                    chosen[prompt.request.number] = prompt
            if len(chosen) < due:
                return None
        rest = [prompt for prompt in ready if prompt.request.number not in chosen]
        return [*chosen.values(), *rest[: size - len(chosen)]]

    def _take(self) -> Rollout:
        taken = self._chosen()
        assert taken is not None
        for prompt in taken:
            self._complete.remove(prompt)
            del self._prompts[prompt.request.number]
        rollout, self._next = self._next, Rollout([], 0, False)
        episode = self._episode
        rollout.exhausted = self._drawing > episode and all(each.episode > episode for each in self._prompts.values())
        self._episode += rollout.exhausted
        rollout.version = min((prompt.version for prompt in taken), default=0)
        groups = {prompt.request.number: prompt.rows for prompt in taken}
        return self._sampler.rollout(groups, rollout.prompts + len(taken), rollout)

    def _collect(self) -> None:
        """On the engines' thread: collect answers, and queue itself again until the run ends."""
        groups = self._groups
        assert groups is not None
        if self._ended:
            return
        try:
            if not groups:
                time.sleep(_LOOK_EVERY / 10)
            began = time.perf_counter()
            answered = groups.answered(_LOOK_EVERY)
            waited = time.perf_counter() - began
            with self._engines.changed:
                self._waited = 0.0 if answered else self._waited + waited
                self._busy += waited
                self._next.seconds += waited
                for request, parts in groups.complete(answered):
                    self._take_up(request, parts)
        except BaseException as error:  # raised on the controller's thread
            self._failure = error
            return
        self._engines.ask(self._collect)

    def _take_up(self, request: Request, parts: Parts) -> None:
        sampler, prompt = self._sampler, self._prompts[request.number]
        filters = sampler.args.algo.dynamic_filtering_enable
        may_drop = sampler.may_drop(max(sampler.per_rollout, len(self._prompts)))
        prompt.rows = sampler.kept(parts, self._next, may_drop, filters)
        if prompt.rows:
            self._complete.append(prompt)
            return
        del self._prompts[request.number]
        self._next.prompts += 1
        if self._drawing == prompt.episode:  # replace it by the episode's next prompt
            self._draw()
