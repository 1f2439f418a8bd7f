"""The reward `code:python`: the share of a row's tests that the program in the response passes, each in a sandbox.

Tests stand in `metadata.tests`, or else in the label, as JSON or, in a label, as Python text:
    "assert add(2, 2) == 4"                                     code that runs behind the program without raising
    {"input": "2 2\\n", "output": "4\\n"}                         a program that is given this and prints that
    a list of these; and {"inputs": [...], "outputs": [...]}, with "fn_name" for a function that is called
The program is the last fenced block of the response, or all of it. It has the standard library.

1. A program that is wrong, raises, hangs or prints too much fails that test: a score, and no failure of the reward.
2. Where a program is killed, for `metadata.test_limit_s` (2 s) or for what it prints, the tests behind count as failed.
3. Tests that would take more time in all than the reward has, and a sandbox that cannot be put up, are failures.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strawflow_workers.rollout.rewards.sandbox import Limits, run_program

_FENCED = re.compile(r"^```[ \t]*(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_SHARE_OF_LIMIT = 0.8
"""Of the reward's time limit; the rest is for what stands around the tests."""
_TEST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Test:
    stdin: str = ""
    expected: str | None = None
    """What must be printed; None: `code` decides."""
    code: str = ""


def load(limit_s: float) -> Callable[..., float]:
    """Return the verifier, which takes at most most of `limit_s` seconds a response."""
    budget_s = _SHARE_OF_LIMIT * limit_s

    def score(
        response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None
    ) -> float:
        del prompt
        tests = _tests(label, metadata)
        test_s = min(float((metadata or {}).get("test_limit_s", _TEST_SECONDS)), budget_s / 2)
        return _share_passed(program_of(response_text), tests, test_s=test_s, budget_s=budget_s)

    return score


def program_of(response_text: str) -> str:
    """Return the last block fenced as Python, else the last fenced block, else the whole response."""
    blocks = _FENCED.findall(response_text)
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    if python:
        return str(python[-1])
    return str(blocks[-1][1]) if blocks else response_text


def _share_passed(program: str, tests: Sequence[_Test], *, test_s: float, budget_s: float) -> float:
    deadline = time.monotonic() + budget_s
    passed = 0
    for number, test in enumerate(tests):
        if time.monotonic() + test_s > deadline:
            raise TimeoutError(
                f"{number} of {len(tests)} tests took {budget_s:g} s; raise rollout.reward_timeout_s or give fewer"
            )
        ran = run_program(program, stdin=test.stdin, test=test.code, limits=Limits(seconds=test_s))
        if ran.exit_code is None:
            break
        if test.expected is None:
            passed += ran.confirmed
        else:
            passed += ran.exit_code == 0 and _lines(ran.output.decode(errors="replace")) == _lines(
                test.expected
            )
    return passed / len(tests)


def _lines(text: str) -> list[str]:
    """Return the lines without white space at their ends and without empty ones at the end of all."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


# ---- how rows write tests


def _tests(label: str | None, metadata: Mapping[str, Any] | None) -> list[_Test]:
    written: Any = (metadata or {}).get("tests", label)
    if written is None:
        raise ValueError("the row has no tests: neither metadata.tests nor a label")
    if isinstance(written, str) and written.lstrip()[:1] in ("[", "{"):
        try:
            written = json.loads(written)
        except json.JSONDecodeError:
            written = [written]  # Python text that begins with a bracket
    if isinstance(written, Mapping) and "inputs" in written:
        tests = _paired(written)
    else:
        tests = [_test(each) for each in (written if isinstance(written, list) else [written])]
    if not tests:
        raise ValueError("the row's list of tests is empty")
    return tests


def _test(written: Any) -> _Test:
    match written:
        case str():
            return _Test(code=written)
        case {"input": str(stdin), "output": str(expected)}:
            return _Test(stdin, expected)
    raise ValueError(
        f"a test is text, or has the texts 'input' and 'output'; this one is {str(written)[:200]}"
    )


def _paired(written: Mapping[str, Any]) -> list[_Test]:
    inputs, outputs, function = written["inputs"], written.get("outputs"), written.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("the tests' 'inputs' and 'outputs' must be lists of the same length")
    if function is None:
        return [_test({"input": i, "output": o}) for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"the tests' 'fn_name' is {function!r}, which names no function")
    return [_Test(code=_call(function, i, o)) for i, o in zip(inputs, outputs, strict=True)]


def _call(function: str, arguments: Any, expected: Any) -> str:
    given = arguments if isinstance(arguments, list) else [arguments]
    return (
        "import json as _json\n"
        f"assert _json.loads(_json.dumps({function}(*_json.loads({json.dumps(given)!r})))) "
        f"== _json.loads({json.dumps(expected)!r})\n"
    )
