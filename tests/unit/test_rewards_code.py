"""Programs of unknown intent in real sandboxes: what they may do, what is taken from them, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from strawflow_workers.rollout.rewards import sandbox
from strawflow_workers.rollout.rewards.code_tests import program_of
from strawflow_workers.rollout.rewards.sandbox import Limits, Ran, SandboxError, run_program
from strawflow_workers.rollout.rewards.verifiers import load_verifier

QUICK = Limits(seconds=10.0)
"""Time enough on a busy machine, for programs that should end by themselves."""


def score(program: str, written: Any, *, limit_s: float = 60.0, **metadata: Any) -> float:
    label = written if isinstance(written, str) else json.dumps(written)
    given = {"test_limit_s": 10.0, **metadata}
    return float(
        load_verifier("code:python", limit_s=limit_s).function(
            program, prompt="", label=label, metadata=given
        )
    )


def printed(program: str, *, limits: Limits = QUICK) -> str:
    ran = run_program(program, limits=limits)
    assert ran.exit_code == 0
    return ran.output.decode()


@pytest.fixture
def only_walls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the host grant some walls alone, as a container without namespaces does."""

    def grant(*names: str) -> None:
        monkeypatch.setattr(sandbox, "walls", lambda: frozenset(names))
        sandbox._uid.cache_clear()

    return grant


@pytest.fixture(autouse=True)
def _forget_user() -> Any:
    yield
    sandbox._uid.cache_clear()


# ---- what a response scores


def test_a_program_scores_the_share_of_its_tests() -> None:
    program = "Sure:\n```python\ndef half(n):\n    return n // 2\n```\nDone."
    assert score(program, ["assert half(4) == 2", "assert half(5) == 2.5"]) == 0.5
    assert score(program, "assert half(4) == 2\nassert half(6) == 3") == 1.0


def test_a_program_is_given_input_and_its_output_is_compared() -> None:
    doubles = "import sys\nfor line in sys.stdin:\n    print(2 * int(line), end='  \\n')\nprint()"
    tests = [{"input": "1\n2\n", "output": "2\n4"}, {"input": "3\n", "output": "7"}]
    assert score(doubles, tests) == 0.5
    assert score(doubles, {"inputs": ["1\n", "4"], "outputs": ["2\n", "8\n"]}) == 1.0


def test_a_function_is_called_with_the_listed_arguments() -> None:
    tests = {"fn_name": "pair", "inputs": [[1, "a"], [None, [2]]], "outputs": [[1, "a"], [None, [3]]]}
    assert score("def pair(x, y):\n    return x, y", tests) == 0.5


def test_tests_of_the_metadata_come_before_the_label() -> None:
    assert score("x = 1", "assert x == 2", tests=["assert x == 1"]) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "this is no Python",
        "def f(): return 2",
        "1 / 0",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import builtins; builtins.compile = builtins.exec = lambda *a: None",
    ],
)
def test_a_program_that_ends_before_its_test_has_not_passed(program: str) -> None:
    assert score(program, "assert f() == 1") == 0.0


def test_a_program_that_hangs_scores_nothing_and_its_other_tests_are_not_waited_for() -> None:
    began = time.monotonic()
    tests = ["assert f(1)", "assert f(0)", "assert f(1)", "assert f(0)"]
    assert score("def f(n):\n    while not n: pass\n    return 1", tests, test_limit_s=1.5) == 0.25
    assert time.monotonic() - began < 15


def test_more_tests_than_time_is_a_failure_that_says_what_to_do() -> None:
    with pytest.raises(TimeoutError, match=r"of 500 tests took 1.6 s; raise rollout.reward_timeout_s"):
        score("x = 1", ["assert x"] * 500, limit_s=2.0, test_limit_s=0.8)


@pytest.mark.parametrize(
    "tests, told",
    [
        ([], "list of tests is empty"),
        ([{"input": "1"}], "a test is text, or has the texts"),
        ({"inputs": ["1"], "outputs": []}, "lists of the same length"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}, "which names no function"),
    ],
)
def test_tests_that_are_none_are_an_error_of_the_row(tests: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        score("x = 1", tests)


def test_a_row_without_tests_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no tests"):
        load_verifier("code:python").function("x", prompt="", label=None, metadata=None)


@pytest.mark.parametrize(
    "response, program",
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\ntext\n```py\nb\n```\n```text\nc\n```", "b\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\na = '```'\n```", "a = '```'\n"),
        ("```python\ncut off", "```python\ncut off"),
    ],
)
def test_the_program_is_the_last_fenced_block_of_python(response: str, program: str) -> None:
    assert program_of(response) == program


# ---- walls


def test_this_host_grants_all_walls() -> None:
    """The tests below rely on it; where it fails, the kernel or a container keeps namespaces back."""
    assert sandbox.missing_walls() == []
    assert load_verifier("code:python").warnings == ()


REACHES_OUT = """
import os, socket
print(sorted(p for p in os.listdir('/proc') if p.isdigit()), os.listdir('.'))
try: socket.create_connection(('127.0.0.1', 1), 1)
except OSError as error: print(error.errno)
"""


def test_a_program_reaches_no_network_and_sees_no_other_process() -> None:
    # Itself and its init; 101: the network is unreachable.
    assert printed(REACHES_OUT).splitlines() == ["['1', '2'] []", "101"]
    assert printed("import os; print(os.getuid() == 0)") == "False\n"


def test_a_program_writes_nowhere_but_in_its_own_small_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    places = [str(tmp_path / "x"), str(Path(__file__).parent / "x"), "/dev/shm/x", "/var/tmp/x", "/etc/x"]
    program = (
        f"for place in {places!r}:\n"
        "    try: open(place, 'w'); print('wrote', place)\n"
        "    except OSError: pass\n"
        "open('mine', 'w').write('1')\n"
        "import tempfile; tempfile.NamedTemporaryFile()\n"
        "written = 0\n"
        "try:\n"
        "    for n in range(20):\n"
        "        with open(str(n), 'wb') as file: written += file.write(bytes(1 << 23))\n"
        "except OSError as error: print(error.errno, written <= 1 << 26)\n"
    )
    assert printed(program) == "28 True\n"  # no space left
    assert list(tmp_path.iterdir()) == []
    assert printed("import os; print(os.listdir('.'))") == "[]\n"


TAKES_RIGHTS = """
import ctypes, os
status = dict(line.split(':') for line in open('/proc/self/status'))
print(int(status['CapEff'], 16), int(status['CapPrm'], 16), status['NoNewPrivs'].strip())
libc = ctypes.CDLL(None)
print(libc.mount(None, b'/', None, ctypes.c_ulong(32 | 4096), None))
print(libc.umount(b'/tmp'))
"""


def test_a_program_cannot_take_rights_or_the_walls_down() -> None:
    assert printed(TAKES_RIGHTS).splitlines() == ["0 0 1", "-1", "-1"]


def test_a_user_namespace_gives_a_program_no_rights_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a worker that is not root: its user has all rights inside, until they are given up."""
    walls = sandbox.walls() | {"user"}
    monkeypatch.setattr(sandbox, "walls", lambda: walls)
    monkeypatch.setattr(sandbox, "_uid", lambda: None)
    assert printed(TAKES_RIGHTS).splitlines() == ["0 0 1", "-1", "-1"]
    assert printed(REACHES_OUT).splitlines() == ["['1', '2'] []", "101"]


def test_a_program_reaches_no_socket_of_the_host() -> None:
    """A read-only file system does not keep a program from sockets in it."""
    place = Path("/run/strawflow-test.sock")
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(str(place))
            listening.listen()
            place.chmod(0o777)
            program = (
                "import os, socket\n"
                f"try: socket.socket(socket.AF_UNIX).connect({str(place)!r})\n"
                "except OSError as error: print(error.errno)\n"
                "print(os.listdir('/dev/shm'))\n"
            )
            assert printed(program) == "2\n[]\n"
        finally:
            place.unlink(missing_ok=True)


def test_a_slow_start_of_the_sandbox_is_not_the_programs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = (
        sys.executable,
        "-c",
        "import os, sys, time; time.sleep(1.5); os.execv(sys.argv[1], sys.argv[1:])",
    )
    monkeypatch.setattr(sandbox, "_COMMAND", (*slow, *sandbox._COMMAND))
    assert run_program("print(1)", limits=Limits(seconds=1.0)) == Ran(0, b"1\n", confirmed=False)


def test_a_program_cannot_pass_its_failure_off_as_the_sandboxs() -> None:
    """It finds the descriptor on which the sandbox speaks, and lies there."""
    program = "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'refused: no room')\n    except OSError: pass"
    assert score(program, "assert f() == 1") == 0.0


@pytest.mark.parametrize(
    "program, printed_text",
    [
        ("try: x = bytearray(2 << 30)\nexcept MemoryError: print('no memory')", "no memory\n"),
        (
            "import os\nopened = []\ntry:\n    while True: opened.append(os.open('/dev/null', os.O_RDONLY))\n"
            "except OSError as error: print(error.errno, len(opened) < 64)",
            "24 True\n",
        ),
        (
            "import os, time\ncount = 0\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(1000)\n"
            "        count += 1\nexcept OSError as error: print(error.errno, count < 32)",
            "11 True\n",
        ),
        (
            "try:\n    with open('big', 'wb') as file: file.write(bytes(1 << 25))\n"
            "except OSError as error: print(error.errno)",
            "27\n",
        ),
    ],
    ids=["memory", "files", "processes", "file size"],
)
def test_a_program_gets_no_more_than_its_limits(program: str, printed_text: str) -> None:
    assert printed(program) == printed_text


def test_a_program_that_prints_without_end_is_stopped() -> None:
    ran = run_program("while True: print('x' * 1000)", limits=Limits(seconds=20.0, output_bytes=10_000))
    assert (ran.exit_code, len(ran.output)) == (None, 10_000)


ESCAPES = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(4321.5)
    os._exit(0)
print("started", flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["while True: pass", "time.sleep(0.3)"])
def test_nothing_of_a_program_outlives_it(then: str) -> None:
    """Neither at the time limit nor after its end, though it left its session and process group."""
    before = {process.pid for process in psutil.process_iter()}
    ran = run_program(ESCAPES.format(then=then), limits=Limits(seconds=3.0))
    assert ran.output == b"started\n"
    left = [
        process
        for process in psutil.process_iter(["pid", "cmdline"])
        if process.pid not in before and any("sandbox_init" in word for word in process.info["cmdline"] or ())
    ]
    assert left == []


def test_a_program_ends_with_the_process_that_asked() -> None:
    """The pool kills a reward process at its limit; what runs inside must not go on."""
    child = os.fork()
    if child == 0:
        run_program("import time\nwhile True: time.sleep(0.1)", limits=Limits(seconds=60.0))
        os._exit(0)
    inside: set[psutil.Process] = set()
    deadline = time.monotonic() + 20
    while len(inside) < 3:  # outside, init, program
        assert time.monotonic() < deadline
        inside = set(psutil.Process(child).children(recursive=True))
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert psutil.wait_procs(inside, timeout=10)[1] == []


# ---- a host that grants less


def test_what_this_host_does_not_grant_is_told(only_walls: Callable[..., None]) -> None:
    only_walls("ipc")
    told = "\n".join(load_verifier("code:python").warnings)
    for text in ("reach the network", "write wherever its user may", "outlives the time limit"):
        assert text in told
    assert "shared memory" not in told


def test_without_namespaces_the_limits_still_hold(only_walls: Callable[..., None]) -> None:
    only_walls()
    assert printed("open('mine', 'w').write('1')\nimport os\nprint(os.listdir('.'))") == "['mine']\n"
    assert score("def f(): return 1", "assert f() == 1") == 1.0
    ran = run_program("while True: pass", limits=Limits(seconds=0.5))
    assert ran == Ran(None, b"", confirmed=False)
    assert "memory" in printed("try: x = bytearray(2 << 30)\nexcept MemoryError: print('memory')")


def test_a_sandbox_that_cannot_be_put_up_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SCRATCH", "/proc/no-such-folder")
    with pytest.raises(SandboxError, match=r"could not be put up: .*no-such-folder"):
        score("x = 1", "assert x")
