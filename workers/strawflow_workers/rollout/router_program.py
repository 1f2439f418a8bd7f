"""SGLang's router as a program that ends with the worker that started it: `router_program PARENT_PID ROUTER_FLAG ...`."""

from __future__ import annotations

import sys

from strawflow.parentage import die_with_parent


def main(words: list[str]) -> None:
    """Serve until killed."""
    die_with_parent(int(words[0]))
    from sglang_router.launch_router import main as launch

    sys.argv = ["sglang_router", *words[1:]]
    launch()


if __name__ == "__main__":
    main(sys.argv[1:])
