"""`strawflow index`: bring an index to this program's revision, and check all promises of a run."""

from __future__ import annotations

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag, RunArgument, opened, run_folder

app = typer.Typer(cls=QuickGroup, help="Upgrade or check the index of a run.", no_args_is_help=True)


@app.command()
def upgrade(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Bring the index to the revision this program works with; stop all workers before."""
    from strawflow import config as configuration
    from strawflow.cli import output
    from strawflow.cli.worker import existing_run
    from strawflow.flow.run import CONFIG_FILE, index_url
    from strawflow.index import migrate
    from strawflow.index.engine import Index

    root = existing_run(run)
    path = root / CONFIG_FILE
    config = configuration.from_json(path.read_text(encoding="utf-8"), path=str(path))
    index = Index(index_url(root, config), durability=config.run.durability)
    try:
        before, after = migrate.upgrade(index)
    finally:
        index.close()
    if as_json:
        output.print_json({"before": before, "after": after, "changed": before != after})
    elif before == after:
        print(f"the index is at revision {after}, nothing to do")
    else:
        print(f"the index went from revision {before or 'none'} to {after}")


@app.command()
def check(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Read every stored extent and ask every promise of the index; exit 11 when one is broken."""
    from strawflow.cli import output
    from strawflow.errors import CorruptPackError
    from strawflow.flow.check import check as check_run

    with opened(run) as found:
        report = check_run(found)
    if as_json:
        output.print_json({"is_sound": report.is_sound, **output.plain(report)})
    else:
        print(
            f"{run_folder(run)}: read {report.num_extents} extents of {report.num_packs} packs, "
            f"{report.num_rows} rows, {output.size(report.num_bytes)}"
        )
        output.print_table(
            ("check", "subject", "what is wrong"),
            [(f.check, f.subject, f.message) for f in report.findings],
            empty="sound: every promise that can be asked holds",
        )
    if not report.is_sound:
        raise typer.Exit(CorruptPackError.exit_code)
