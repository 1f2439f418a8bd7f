from __future__ import annotations


def refuse_original_logprobs(env): pass
