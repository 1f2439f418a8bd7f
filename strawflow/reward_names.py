"""Names of rewards: what may stand in `rollout.reward`, in `rollout.row_rewards` and in a row's `metadata.reward`.

1. A name is judged by its form alone: nothing is imported, no server is asked. An unknown one is told with the nearest known.
2. A row may name what strawflow itself grades; a dotted path or an address only where the run's `rollout.row_rewards` lists it:
   prompt files are data, and data decides neither what code runs nor who is sent the responses.
3. The rewards themselves are the workers' (`strawflow_workers.rollout.rewards`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from strawflow.dotted_path import is_dotted_path
from strawflow.errors import ConfigError

BUILT_IN = ("exact", "f1", "math", "multiple_choice", "instructions", "code:python", "random")
BOXABLE = ("exact", "f1", "math", "multiple_choice")
"""Built-in rewards that also come as `boxed_NAME`; `boxed_reasoning_gym:DATASET` does as well."""
BOXED = "boxed_"
GROUP = "group:"
GYM = "reasoning_gym"
REMOTE = "remote"
REWARD_MODEL = "reward_model"

_FORMS = (*BUILT_IN, *(BOXED + name for name in BOXABLE), f"{GYM}:", f"{REMOTE}:", f"{REWARD_MODEL}:", GROUP)
_KNOWN = f"known are {', '.join(BUILT_IN)}, {BOXED}NAME, {GYM}:DATASET, package.module:function, {REMOTE}:URL and {REWARD_MODEL}:URL"


@dataclass(frozen=True, slots=True)
class RewardName:
    """A reward's name, taken apart."""

    text: str
    kind: Literal["built_in", "reasoning_gym", "function", "remote", "reward_model"]
    target: str
    """The built-in's name, the dataset, `module:function`, or the address without a closing slash."""
    boxed: bool = False
    """What is graded is the last \\boxed{...} of the response."""
    takes_group: bool = False
    """By its name, it scores all members of a group in one call; a function may also say so itself."""

    @property
    def over_http(self) -> bool:
        return self.kind in ("remote", "reward_model")

    @property
    def needs_listing(self) -> bool:
        """Whether a row may name it only where the run lists it."""
        return self.kind == "function" or self.over_http


def parse_reward(text: str) -> RewardName:
    """Take the name of a reward apart.

    Raises:
        ConfigError: no reward has such a name; the nearest known one is told.
    """
    takes_group = text.startswith(GROUP)
    rest = text.removeprefix(GROUP)
    boxed = rest.startswith(BOXED) and _may_be_boxed(rest.removeprefix(BOXED))
    rest = rest.removeprefix(BOXED) if boxed else rest
    scheme, _, target = rest.partition(":")
    if scheme == REMOTE:
        return RewardName(text, "remote", _address(text, scheme, target), takes_group=takes_group)
    found = _one_at_a_time(text, rest, boxed)
    if found is not None:
        if takes_group:
            raise ConfigError(f"reward {text!r}: this one scores one response at a time; leave out {GROUP!r}")
        return found
    if is_dotted_path(rest) and scheme != "code":  # `code:...` is never meant to be Python's own module
        return RewardName(text, "function", rest, takes_group=takes_group)
    raise ConfigError(f"reward {text!r} is unknown{_nearest(rest)}; {_KNOWN}")


def _one_at_a_time(text: str, rest: str, boxed: bool) -> RewardName | None:
    scheme, _, target = rest.partition(":")
    if rest in BUILT_IN:
        return RewardName(text, "built_in", rest, boxed)
    if scheme == GYM and target:
        return RewardName(text, "reasoning_gym", target, boxed)
    if scheme == REWARD_MODEL:
        return RewardName(text, "reward_model", _address(text, scheme, target))
    return None


def _address(text: str, scheme: str, target: str) -> str:
    if not is_address(target):
        raise ConfigError(f"reward {text!r}: an address is missing; write {scheme}:http://HOST:PORT/PATH")
    return target.rstrip("/")


def is_address(text: str) -> bool:
    """Return whether a text is the address of a server, http://HOST[:PORT]."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        return False


def parse_row_reward(text: str, *, listed: Collection[str]) -> RewardName:
    """Take apart the name that a row gives; `listed` are those of `rollout.row_rewards`.

    Raises:
        ConfigError: no reward has such a name, or the run does not let rows name it.
    """
    name = parse_reward(text)
    if name.needs_listing and text not in listed:
        raise ConfigError(
            f"reward {text!r} is named by a row, and the run's rollout.row_rewards does not list it; "
            f"functions and addresses must be listed there"
        )
    return name


def nearest_scheme(scheme: str) -> str:
    """Return `; did you mean ...?` where the module of a dotted path looks like a scheme misspelt, else nothing."""
    near = difflib.get_close_matches(scheme, (GYM, REMOTE, REWARD_MODEL, "code", "group"), n=1, cutoff=0.75)
    return f"; did you mean '{near[0]}:'?" if near else ""


def _may_be_boxed(name: str) -> bool:
    return name in BOXABLE or name.startswith(f"{GYM}:")


def _nearest(rest: str) -> str:
    if "." in rest and ":" not in rest:
        module, _, function = rest.rpartition(".")
        return f"; a function is written with a colon: '{module}:{function}'"
    near = difflib.get_close_matches(rest, _FORMS, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
