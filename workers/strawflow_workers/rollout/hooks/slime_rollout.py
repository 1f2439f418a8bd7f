"""slime's rollout function, `generate_rollout(args, rollout_id, data_source, evaluation)`, as a hook of whole claims.

1. It runs in a thread. `data_source.get_samples(n)` gives the groups of the claim and no more; `args.rollout_batch_size` is their
   number and `args.rollout_temperature` and its neighbours are those of their sampling profile.
2. It is always called with evaluation=False: evaluation groups are prompts of the run, not of a file in `args`. A claim of
   several profiles is several calls.
3. What comes back is found by `group_index` and `index`. A group that it left out fails, saying so: dropping groups is
   `assemble.group_filter`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import Any
from urllib.parse import urlsplit

from strawflow_workers.rollout.hooks import interfaces
from strawflow_workers.rollout.hooks.interfaces import Engines, Interrupted, Rollout
from strawflow_workers.rollout.hooks.slime import Arguments, Sample, asked_sample, keywords, rollout_of

Function = Callable[..., Any]
Groups = Sequence[Sequence[interfaces.Sample]]


class ClaimSource:
    """slime's data source over the groups of one claim."""

    def __init__(self, groups: list[list[Sample]]) -> None:
        self._groups = groups
        self._num_given = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups.

        Raises:
            RuntimeError: more are asked for than were claimed.
        """
        given = self._groups[self._num_given : self._num_given + num_samples]
        if len(given) < num_samples:
            raise RuntimeError(
                f"the function asked for {self._num_given + num_samples} groups of a claim of {len(self._groups)}: strawflow claims "
                "as many as it has room for; over-sampling is rollout.over_provision, dynamic sampling assemble.group_filter"
            )
        self._num_given += num_samples
        return given

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"strawflow's data source has no {name}: it gives the groups of a claim by get_samples(n); what is unfinished is kept "
            "by sessions (rollout.generate)"
        )


def generate_groups_hook(function: Function, args: Arguments) -> interfaces.GenerateGroupsHook:
    """Return slime's rollout function as a hook of whole claims."""
    numbers = count()

    async def generate(groups: Groups, engines: Engines) -> list[list[Any]]:
        made: dict[tuple[int, int], Any] = {}
        for alike in _by_sampling(groups):
            made |= await asyncio.to_thread(_called, function, args, alike, engines, next(numbers))
        return [[made[sample.unit_id, sample.member] for sample in group] for group in groups]

    return generate


def _by_sampling(groups: Groups) -> Iterator[list[Sequence[interfaces.Sample]]]:
    def profile(group: Sequence[interfaces.Sample]) -> str:
        return repr((group[0].purpose, len(group), sorted(group[0].sampling.items())))

    for _, alike in groupby(sorted((g for g in groups if g), key=profile), key=profile):
        yield list(alike)


def _called(
    function: Function, args: Arguments, groups: Groups, engines: Engines, number: int
) -> dict[tuple[int, int], Any]:
    """Call the function for groups of one profile; returns a rollout, or Interrupted, for each (unit, member)."""
    own = _arguments(args, groups, engines)
    source = ClaimSource([[asked_sample(sample) for sample in group] for group in groups])
    found = function(own, number, source, **keywords(function, {"evaluation": False}))
    found = getattr(found, "samples", found)
    samples: dict[tuple[int, int], list[Any]] = {}
    for sample in _flat(found):
        samples.setdefault((sample.group_index, sample.index), []).append(sample)
    keys = [(sample.unit_id, sample.member) for group in groups for sample in group]
    if foreign := samples.keys() - set(keys):
        raise ValueError(f"samples of (group_index, index) {sorted(foreign)} came back that were not given")
    return {key: _rollout(samples.get(key), engines, own) for key in keys}


def _arguments(args: Arguments, groups: Groups, engines: Engines) -> Arguments:
    sampling: Mapping[str, Any] = groups[0][0].sampling
    address = urlsplit(engines.url)
    return Arguments(
        **{
            **vars(args),
            "sglang_router_ip": address.hostname,
            "sglang_router_port": address.port,
            "rollout_batch_size": len(groups),
            "over_sampling_batch_size": len(groups),
            "n_samples_per_prompt": len(groups[0]),
            "rollout_temperature": sampling["temperature"],
            "rollout_top_p": sampling["top_p"],
            "rollout_max_response_len": sampling["max_new_tokens"],
        }
    )


def _flat(found: Any) -> Iterator[Any]:
    if isinstance(found, list | tuple):
        for one in found:
            yield from _flat(one)
    elif found is None or not hasattr(found, "group_index"):
        raise TypeError(
            f"the function must return lists of samples, or an object with `samples`; got {found!r:.200}"
        )
    else:
        yield found


def _rollout(samples: Sequence[Any] | None, engines: Engines, args: Arguments) -> Rollout | Interrupted:
    if not samples:
        return Rollout(segments=[], failure="the function returned nothing for this sample")
    try:
        return rollout_of(samples, engines.served, args)
    except Interrupted as interrupted:
        return interrupted
    except (TypeError, ValueError) as error:  # this one's own: the others stand
        return Rollout(segments=[], failure=f"{type(error).__name__}: {error}")
