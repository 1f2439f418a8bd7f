"""Runs at the start of every Python process of an SGLang process tree (the folder is put first on PYTHONPATH).

1. The process dies with its parent (`strawflow_deathsig`), on every device: no engine outlives who started it.
2. With STRAWFLOW_SGLANG_CPU=1 (hosts without CUDA) imports by sglang of packages that cannot be had resolve to
   stubs that raise when called (`strawflow_sglang_stubs`).
3. A sitecustomize that this one hides is run as well. This module knows nothing of the server's options.
"""

from __future__ import annotations

import os
import runpy
import sys

import strawflow_deathsig

strawflow_deathsig.arm()

if os.environ.get("STRAWFLOW_SGLANG_CPU") == "1":
    import strawflow_sglang_stubs

    strawflow_sglang_stubs.install()


def _run_hidden_sitecustomize() -> None:
    here = os.path.realpath(os.path.dirname(__file__))
    for folder in sys.path:
        candidate = os.path.join(folder or os.curdir, "sitecustomize.py")
        if os.path.realpath(os.path.dirname(candidate)) != here and os.path.isfile(candidate):
            runpy.run_path(candidate)
            return


_run_hidden_sitecustomize()
