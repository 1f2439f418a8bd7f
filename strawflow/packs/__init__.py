"""Packs: the append-only Arrow files that hold every stored row. This layer knows bytes only, and no index.

`store` is what writers use (one open pack per session and kind, group commit), `reader` what everybody reads with;
`writer` is one file, `salvage` copies extents out of a pack whose writer died, `probe` says what a mount can promise.
"""

from __future__ import annotations
