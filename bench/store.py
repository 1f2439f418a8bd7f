"""How fast payload becomes durable, is found again and read, against straw, TransferQueue and the device.

    python bench/store.py [--quick] [--json] [--folder DIR] [--only SECTION]

Rows and rounds are explained in bench/rows.py; what bounds each figure in bench/README.md.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from functools import partial

import apart
import floors
import numpy as np
from loop import SAMPLE_BYTES, Loop, create
from packs import PackRecords, StoredArray
from peers import straw, transferqueue
from rows import Bench, Row, alone, at_least, at_most, compare, main, take_turns, timed

MB = 1e6
SMALL = 16 * 2**10
BIG = 8 * 2**20
THREADS = 16
BULK = 1000
TWO_SYNCS = "append + fdatasync + SQLite commit"


def batch(bench: Bench) -> Iterator[Row]:
    """The GRPO batch: 64 groups of 8 samples of 4,096 tokens, with log-probabilities and mask."""
    groups, samples, tokens = 64, 8, 4096
    peer = transferqueue.TransferQueueProcess(num_samples=groups * samples, num_tokens=tokens)
    loop = Loop(
        create(bench.path("batch"), samples=samples, durability="process"), tokens=tokens, samples=samples
    )
    with peer, loop, loop.store.consumer("trainer") as consumer:

        def get() -> float:
            seconds, found = timed(lambda: consumer.next_batch(groups))
            assert found is not None
            assert found.rows.num_rows == groups * samples
            consumer.advance()
            return peer.num_bytes / seconds / MB

        raw, whole = bench.folder / "batch.raw", os.urandom(peer.num_bytes)
        # The two of a side follow each other, since a get takes what the put before has brought.
        rates = take_turns(
            {
                "put": lambda: peer.num_bytes / loop.put(groups) / MB,
                "get": get,
                "peer put": lambda: peer.put() / MB,
                "peer get": lambda: peer.get() / MB,
                "floor": lambda: peer.num_bytes / floors.write(raw, whole) / MB,
            },
            bench.rounds,
            is_reversed=False,
        )
    yield compare(
        "put a GRPO batch of 512 samples, level process",
        rates["put"],
        "MB/s",
        against=transferqueue.LABEL,
        theirs=rates["peer put"],
        target=at_least(1),
    )
    yield compare(
        "put a GRPO batch of 512 samples, level process",
        rates["put"],
        "MB/s",
        against="write of the same bytes, not synced",
        theirs=rates["floor"],
    )
    yield compare(
        "get it: planned durably, read, verified",
        rates["get"],
        "MB/s",
        against=transferqueue.LABEL,
        theirs=rates["peer get"],
        target=at_least(4),
    )


def cycle(bench: Bench) -> Iterator[Row]:
    """Claim, publish 16 KiB, complete: one worker, then 16 threads, level host."""
    ours_count, peer_count = bench.pick(300, 1000), bench.pick(100, 300)
    payloads = small_payloads()
    floor = floors.TwoSyncs(bench.folder / "cycle-floor")
    peer = straw.StrawQueue(bench.path("cycle-straw"), payloads)
    with Loop(create(bench.path("cycle")), tokens=SMALL // SAMPLE_BYTES) as loop:
        rates = take_turns(
            {
                "ours": lambda: loop.cycles(ours_count),
                "straw": lambda: peer.cycles(peer_count),
                "floor": lambda: floor.cycles(repeated(payloads, ours_count), window=1),
            },
            bench.rounds,
        )
    peer.close()
    floor.close()
    name = "claim, publish 16 KiB, complete: one worker"
    yield compare(
        name, rates["ours"], "cycles/s", against=straw.LABEL, theirs=rates["straw"], target=at_least(4)
    )
    yield compare(name, rates["ours"], "cycles/s", against=TWO_SYNCS, theirs=rates["floor"])


def threads(bench: Bench) -> Iterator[Row]:
    """The same by 16 threads of one process."""
    ours_count, peer_count = bench.pick(100, 400), bench.pick(12, 40)
    payloads = small_payloads()
    floor = floors.TwoSyncs(bench.folder / "threads-floor")
    peer = straw.StrawQueue(bench.path("threads-straw"), payloads, threads=THREADS)
    with Loop(create(bench.path("threads")), tokens=SMALL // SAMPLE_BYTES) as loop:
        rates = take_turns(
            {
                "ours": lambda: loop.cycles_in_threads(ours_count, threads=THREADS),
                "straw": lambda: peer.cycles_in_threads(peer_count),
                "floor": lambda: floor.cycles(repeated(payloads, ours_count * THREADS), window=THREADS),
            },
            bench.rounds,
        )
    peer.close()
    floor.close()
    name = f"the same: {THREADS} threads of one process"
    yield compare(
        name,
        rates["ours"],
        "cycles/s",
        against=f"{straw.LABEL}, {THREADS} threads",
        theirs=rates["straw"],
        target=at_least(12),
    )
    yield compare(
        name, rates["ours"], "cycles/s", against=f"{TWO_SYNCS}, {THREADS} at a time", theirs=rates["floor"]
    )


def bulk(bench: Bench) -> Iterator[Row]:
    """1,000 units of 16 KiB each, claimed and completed at once."""
    peer_count = bench.pick(192, 1000)
    peer = straw.StrawQueue(bench.path("bulk-straw"), small_payloads())
    with Loop(create(bench.path("bulk")), tokens=SMALL // SAMPLE_BYTES) as loop:
        rates = take_turns(
            {
                "ours": lambda: loop.in_bulk(BULK),
                "one": lambda: peer.cycles(peer_count // 2),
                **{str(n): partial(peer.in_chunks, peer_count, n) for n in straw.CHUNKS},
            },
            bench.rounds,
        )
    peer.close()
    best = max(straw.CHUNKS, key=lambda n: statistics.median(rates[str(n)]))
    name = "complete 1,000 units with 16 KiB each"
    yield compare(
        name,
        rates["ours"],
        "units/s",
        against=f"{straw.LABEL}, chunks of {best}",
        theirs=rates[str(best)],
        target=at_least(10),
    )
    yield compare(
        name,
        rates["ours"],
        "units/s",
        against=f"{straw.LABEL}, one by one",
        theirs=rates["one"],
        target=at_least(30),
    )


def append(bench: Bench) -> Iterator[Row]:
    """8 MiB records, each durable before the next."""
    count = bench.pick(8, 24)
    ours = PackRecords(bench.path("append"), num_bytes=BIG)
    peer = straw.StrawRecords(bench.path("append-straw"), num_bytes=BIG)
    pieces = repeated([os.urandom(BIG) for _ in range(4)], count)
    raw = bench.folder / "append.raw"
    rates = take_turns(
        {
            "ours": lambda: ours.append(count) / MB,
            "floor": lambda: count * BIG / floors.append_and_sync(raw, pieces) / MB,
            "straw": lambda: peer.append(count) / MB,
        },
        bench.rounds,
    )
    ours.close()
    peer.close()
    raw.unlink()
    name = "append 8 MiB records, checksummed, each synced"
    yield compare(
        name,
        rates["ours"],
        "MB/s",
        against="append + fdatasync",
        theirs=rates["floor"],
        target=at_least(0.9),
    )
    yield compare(name, rates["ours"], "MB/s", against=straw.LABEL, theirs=rates["straw"])


def read(bench: Bench) -> Iterator[Row]:
    """Warm reads with verification: every record's checksum is computed and compared."""
    count = bench.pick(16, 48)
    ours = PackRecords(bench.path("read-big"), num_bytes=BIG, durability="process")
    peer = straw.StrawRecords(bench.path("read-big-straw"), num_bytes=BIG)
    mapped = floors.MappedFile(ours.fill(count))
    peer.fill_tensors(count)
    rates = take_turns(
        {
            "ours": lambda: ours.read() / MB,
            "sum": lambda: mapped.sum(BIG) / MB,
            "straw": lambda: peer.read_tensors() / MB,
        },
        bench.rounds,
    )
    ours.close()
    peer.close()
    name = "read 8 MiB records, verified, warm"
    yield compare(name, rates["ours"], "MB/s", against=straw.LABEL, theirs=rates["straw"], target=at_least(3))
    yield compare(
        name,
        rates["ours"],
        "MB/s",
        against="sum of the same mmap",
        theirs=rates["sum"],
        target=at_least(0.5),
    )
    yield from _read_small(bench)


def _read_small(bench: Bench) -> Iterator[Row]:
    count = 2048
    ours = PackRecords(bench.path("read-small"), num_bytes=SMALL, durability="process")
    peer = straw.StrawRecords(bench.path("read-small-straw"), num_bytes=SMALL)
    ours.fill(count)
    peer.fill_records(count // 2)
    rates = take_turns(
        {
            "many": lambda: ours.read_many() / MB,
            "each": lambda: ours.read() / MB,
            "straw": lambda: peer.read_records() / MB,
        },
        bench.rounds,
    )
    ours.close()
    peer.close()
    against = f"{straw.LABEL} in a session"
    yield compare(
        "read 16 KiB records, verified, warm, 64 a call",
        rates["many"],
        "MB/s",
        against=against,
        theirs=rates["straw"],
        target=at_least(5),
    )
    yield compare(
        "read 16 KiB records, verified, warm, one a call",
        rates["each"],
        "MB/s",
        against=against,
        theirs=rates["straw"],
    )


def slice_(bench: Bench) -> Iterator[Row]:
    """One of eight data-parallel slices of a batch of 1 GiB, read in a fresh process."""
    slices, width = 8, 4096
    rows = 2**30 // (4 * width)
    folder, places = bench.path("slice"), bench.folder / "slice.json"
    array = np.random.default_rng(7).random((rows, width), np.float32)
    StoredArray.write(folder, places, array, slices=slices)
    del array
    size = 2**30 // slices
    found = [
        apart.run("slice", str(folder), str(places), str(n * rows // slices), str((n + 1) * rows // slices))
        for n in range(bench.rounds)
    ]
    yield alone(
        "memory to read 128 MiB of a 1 GiB batch, beyond the 128 MiB",
        [(f["memory"] - size) / 2**20 for f in found],
        "MiB",
        target=at_most(64),
    )
    yield alone(
        "bytes read and mapped for it, against the slice",
        [(f["read"] + f["mapped"]) / size for f in found],
        "x",
        target=at_most(1.1),
    )


def small_payloads() -> list[bytes]:
    return [os.urandom(SMALL) for _ in range(64)]


def repeated(pieces: list[bytes], count: int) -> list[bytes]:
    return [pieces[number % len(pieces)] for number in range(count)]


if __name__ == "__main__":
    raise SystemExit(
        main(
            __doc__ or "",
            {
                "batch": batch,
                "cycle": cycle,
                "threads": threads,
                "bulk": bulk,
                "append": append,
                "read": read,
                "slice": slice_,
            },
        )
    )
