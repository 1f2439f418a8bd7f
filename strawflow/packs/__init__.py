"""Packs: the append-only Arrow files that hold every stored row. This layer knows bytes only, and no index.

`store` is what writers use (one open pack per session and kind, group commit), `reader` what everybody reads with, and
`tensors` cuts big arrays into rows for both. `writer` is one file, `messages` what one extent's bytes must be, `digests`
their checksums; `places` says where packs lie, `posix` in a folder, `objects` in an object store. `salvage` copies extents
out of a pack whose writer died, `probe` says what a place can promise.
"""

from __future__ import annotations
