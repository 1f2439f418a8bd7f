"""procrastinate 3.10.0 on PostgreSQL: jobs put in bulk, taken by several worker processes with 16 jobs in hand each.

1. A worker takes and finishes jobs one statement each whatever its settings; `concurrency` is how many it has in hand at
   once, which is the nearest it has to a batch.
2. Notifications are off and a worker stops at an empty queue: what is measured is taking, running nothing, and finishing.
3. The connection pool has procrastinate's own size (sizes from 1 to 16 were tried on a busy machine; none stood out).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import procrastinate
from crowd import Work

LABEL = "procrastinate 3.10.0"
CONCURRENCY = 16


def _app(connector: procrastinate.BaseConnector) -> procrastinate.App:
    app = procrastinate.App(connector=connector)

    @app.task(name="nothing")
    async def nothing(number: int) -> None: ...

    return app


class JobQueue:
    """The queue's producing side."""

    def __init__(self, conninfo: str) -> None:
        self._app = _app(procrastinate.SyncPsycopgConnector(conninfo=conninfo))
        self._app.open()
        self._app.schema_manager.apply_schema()

    def close(self) -> None:
        self._app.close()

    def put(self, count: int) -> None:
        """Defer jobs in bulk; not measured."""
        task = self._app.tasks["nothing"]
        for first in range(0, count, 1000):
            task.batch_defer(*[{"number": n} for n in range(first, min(first + 1000, count))])

    def num_finished(self) -> int:
        rows = self._app.connector.execute_query_one(
            "SELECT count(*) AS count FROM procrastinate_jobs WHERE status = 'succeeded'"
        )
        return int(rows["count"])


@contextmanager
def worker(number: int, conninfo: str) -> Iterator[Work]:
    """Be one worker process: each round of work empties the queue."""
    logging.disable(logging.ERROR)
    app = _app(procrastinate.PsycopgConnector(conninfo=conninfo))
    with asyncio.Runner() as runner:
        runner.run(_opened(app))

        def work() -> int:
            runner.run(
                app.run_worker_async(
                    name=f"worker-{number}",
                    concurrency=CONCURRENCY,
                    wait=False,
                    listen_notify=False,
                    install_signal_handlers=False,
                )
            )
            return 0  # who did how many is in the database

        yield work
        runner.run(app.close_async())


async def _opened(app: procrastinate.App) -> None:
    await app.open_async()
