"""What a person sees of a run: the live display, the closing summary, summary.json and the plot.

Everything is read from the index and the packs; nothing here changes the run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from strawflow.eval_datasets import HELD_OUT
from strawflow.flow import engines, evaluation, history, tally
from strawflow.flow.progress import evaluation_progress, standing
from strawflow.flow.run import Run, write_durably

SUMMARY_FILE = "summary.json"
REFRESH_S = 0.5
PLAIN_EVERY_S = 10.0
BAR = "▁▂▃▄▅▆▇█"


class ProgressDisplay:
    """A live table on a terminal; a line every ten seconds where the output is no terminal."""

    def __init__(self, run: Run, *, live: Live | None, plain: Console | None) -> None:
        self._run, self._live, self._plain = run, live, plain
        self._started = time.monotonic()
        self._updated = 0.0
        self._shown_line = ""

    def update(self) -> None:
        now = time.monotonic()
        every = REFRESH_S if self._live is not None else PLAIN_EVERY_S
        if now - self._updated < every:
            return
        self._updated = now
        if self._live is not None:
            self._live.update(self._render())
        elif self._plain is not None and (line := self._line()) != self._shown_line:
            self._shown_line = line
            self._plain.print(line, highlight=False)

    def _line(self) -> str:
        now = self._snapshot()
        return (
            f"[{time.monotonic() - self._started:5.0f} s] {now['stage']}: step {now['trained']}/{now['total']}, "
            f"reward {_shown(now['reward'])}, loss {_shown(now['loss'])}, restarts {now['restarts']:.0f}"
        )

    def _render(self) -> Table:
        now = self._snapshot()
        bar = Progress(TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn())
        bar.add_task(now["stage"], total=now["total"], completed=now["trained"])
        table = Table.grid(padding=(0, 2))
        table.add_row("run", str(self._run.root))
        table.add_row("steps", bar)
        table.add_row("reward", f"{_shown(now['reward'])}  {sparkline(now['rewards'])}")
        table.add_row("loss", _shown(now["loss"]))
        table.add_row("stored", f"batches up to step {now['planned']}, checkpoint of step {now['position']}")
        table.add_row("engine", now["engines"])
        table.add_row("time", f"{time.monotonic() - self._started:.0f} s, {now['restarts']:.0f} restarts")
        return table

    def _snapshot(self) -> dict[str, Any]:
        steps = history.steps(self._run)
        now = standing(self._run)
        rl = [s for s in steps if s["objective"] == "grpo"]
        trained = steps[-1]["step"] if steps else 0
        warm = self._run.config.warm_start.steps
        served = engines.listed(self._run)
        stage = "warm start" if trained < warm else "GRPO"
        if trained >= warm and not any(e.url for e in served):
            stage = "waiting for the engine"
        elif now.evaluating:
            settled, admitted = evaluation_progress(self._run)
            stage = f"evaluating, {settled} of {admitted} answered"
        return {
            "stage": stage,
            "trained": trained,
            "total": self._run.config.total_steps,
            "planned": now.planned,
            "position": now.position,
            "reward": rl[-1]["mean_reward"] if rl else None,
            "rewards": [s["mean_reward"] for s in rl],
            "loss": steps[-1]["loss"] if steps else None,
            "engines": ", ".join(f"{e.build}, weights {e.version_id}" for e in served) or "-",
            "restarts": tally.read(self._run)["restarts"],
        }


@contextlib.contextmanager
def progress_display(run: Run, *, as_json: bool) -> Iterator[ProgressDisplay]:
    """Show a run's progress on stderr while the block runs; silent with --json."""
    console = Console(stderr=True)
    if as_json:
        yield ProgressDisplay(run, live=None, plain=None)
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield ProgressDisplay(run, live=live, plain=None)
    else:
        yield ProgressDisplay(run, live=None, plain=console)


def write_summary(run: Run) -> dict[str, Any]:
    """Write summary.json and the plot into the run's folder; returns the summary."""
    summary = summarise(run)
    write_durably(run.root / SUMMARY_FILE, (json.dumps(summary, indent=2) + "\n").encode())
    plot(run, run.root / "plot.png")
    return summary


def summarise(run: Run) -> dict[str, Any]:
    """Return the run's figures; values are None where the run has none (no evaluation, no such step)."""
    config = run.config
    steps = history.steps(run)
    rl = [s for s in steps if s["objective"] == "grpo"]
    stored = history.batches(run)
    counts = tally.read(run)
    first, last = config.warm_start.steps, config.total_steps
    evaluated = evaluation.results(run)
    held_out = {(r.profile, r.step): r for r in evaluated if r.dataset == HELD_OUT}

    def value(profile: str, step: int) -> float | None:
        found = held_out.get((profile, step))
        return None if found is None else found.accuracy

    outcomes = history.outcomes(run)
    rewards = [s["mean_reward"] for s in rl]
    return {
        "run": str(run.root),
        "seed": config.run.seed,
        "accuracy_before": value("eval_sampled", first),
        "accuracy_after": value("eval_sampled", last),
        "greedy_accuracy_before": value("eval_greedy", first),
        "greedy_accuracy_after": value("eval_greedy", last),
        "num_held_out": next((r.num_prompts for r in held_out.values()), None),
        "num_failed_answers": sum(r.num_failed for r in evaluated),
        "evaluations": [r.fields() for r in evaluated],
        "steps": len(rl),
        "warm_start_steps": len(steps) - len(rl),
        "reward_by_step": rewards,
        "loss_by_step": [s["loss"] for s in rl],
        "mean_reward_first": _mean(rewards[:5]),
        "mean_reward_last": _mean(rewards[-5:]),
        "tokens_generated": history.tokens_generated(run),
        "tokens_trained": sum(s["num_tokens"] for s in steps),
        "max_staleness": max((b.max_staleness for b in stored if b.objective == "grpo"), default=None),
        "logprob_gap_mean": _mean([s["logprob_gap_mean"] for s in rl if s["logprob_gap_mean"] is not None]),
        "units": {
            f"{purpose} {outcome}" + (f" ({reason})" if reason else ""): number
            for (purpose, outcome, reason), number in sorted(outcomes.items(), key=str)
        },
        "steps_without_signal": sum(1 for b in stored if b.objective == "grpo" and not b.num_sequences),
        "seconds": round(counts["seconds"], 1),
        "restarts": int(counts["restarts"]),
        "resumes": int(counts["resumes"]),
    }


def print_summary(run: Run, summary: dict[str, Any]) -> None:
    """Print the closing summary and what to type next."""
    console = Console()
    table = Table(title=f"run {run.name}: finished", title_justify="left", show_header=False)
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before is not None and after is not None:
        table.add_row(
            "accuracy, temperature 1",
            f"{before:.1%} → {after:.1%}  ({100 * (after - before):+.1f} points, {summary['num_held_out']} held-out prompts)",
        )
    greedy = summary["greedy_accuracy_before"], summary["greedy_accuracy_after"]
    if None not in greedy:
        table.add_row(
            "accuracy, greedy",
            f"{greedy[0]:.1%} → {greedy[1]:.1%}  ({100 * (greedy[1] - greedy[0]):+.1f} points)",
        )
    if summary["num_failed_answers"]:
        table.add_row(
            "failed answers", f"{summary['num_failed_answers']} in the evaluations, counted as wrong"
        )
    for name, told in _datasets(summary.get("evaluations", [])):
        table.add_row(name, told)
    table.add_row(
        "mean reward",
        f"{_shown(summary['mean_reward_first'])} first 5 steps → {_shown(summary['mean_reward_last'])} last 5",
    )
    table.add_row("reward by step", sparkline(summary["reward_by_step"]))
    table.add_row("steps", f"{summary['warm_start_steps']} supervised, {summary['steps']} GRPO")
    table.add_row(
        "tokens", f"{summary['tokens_generated']:,} generated, {summary['tokens_trained']:,} with a loss"
    )
    table.add_row("staleness", f"at most {_shown(summary['max_staleness'], 'd')} steps")
    table.add_row(
        "log-probabilities",
        f"engine and trainer differ by {_shown(summary['logprob_gap_mean'], '.1e')} on average",
    )
    if empty := summary["steps_without_signal"]:
        table.add_row(
            "NOTHING LEARNED in", f"{empty} of {summary['steps']} GRPO steps: every group had equal rewards"
        )
    table.add_row("units", ", ".join(f"{n} {what}" for what, n in sorted(summary["units"].items())))
    table.add_row(
        "time",
        f"{summary['seconds']:.0f} s, {summary['restarts']} restarts of workers, {summary['resumes']} resumes",
    )
    table.add_row("the run lies in", str(run.root))
    table.add_row("plot", str(run.root / "plot.png"))
    console.print(table)
    name, where = program(), shortest(run)
    console.print("next:", highlight=False)
    for command, what in (
        (f"{name} status {where}", "what the run holds"),
        (
            f"{name} batch show {where} {run.config.total_steps}",
            "the last step's prompts, rewards and fates",
        ),
        (f"{name} replay {where}", "train again from the stored batches alone and compare"),
    ):
        console.print(f"  {command}   # {what}", highlight=False, soft_wrap=True)


def _datasets(evaluated: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a line for each dataset beside `held_out`: pass@k of its first and its last evaluation."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in evaluated:
        if result["dataset"] != HELD_OUT:
            name = result["dataset"] + (", greedy" if result["is_greedy"] else "")
            found.setdefault(name, []).append(result)
    lines = []
    for name, results in found.items():
        first, last = results[0], results[-1]
        told = [f"pass@{k} {value:.1%} → {last['pass_at'][k]:.1%}" for k, value in first["pass_at"].items()]
        lines.append(
            (
                name,
                f"{', '.join(told)}  ({last['num_prompts']} prompts, step {first['step']} → {last['step']})",
            )
        )
    return lines


def kept_summary(run: Run) -> dict[str, Any] | None:
    """Return the summary of a run that was finished before, as it was written."""
    path = run.root / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def forget_summary(run: Run) -> None:
    (run.root / SUMMARY_FILE).unlink(missing_ok=True)


def program() -> str:
    """Return how the program is called here: by its name when the shell finds it, else by its path."""
    beside = Path(sys.executable).with_name("strawflow")
    if shutil.which("strawflow") or not beside.exists():
        return "strawflow"
    with contextlib.suppress(ValueError):
        return str(beside.relative_to(Path.cwd()))
    return str(beside)


def shortest(run: Run) -> str:
    """Return the run's folder as it is typed from here."""
    with contextlib.suppress(ValueError):
        return str(run.root.relative_to(Path.cwd()))
    return str(run.root)


def plot(run: Run, path: Path) -> None:
    """Draw reward and loss by step, what the evaluations came to beside the reward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = history.steps(run)
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6.4), constrained_layout=True)
    figure.suptitle(f"strawflow run {run.name}")
    _plot_reward(upper, run, [s for s in steps if s["objective"] == "grpo"])
    _plot_loss(lower, run, steps)
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.rename(path)


def _plot_reward(axis: Any, run: Run, steps: list[dict[str, Any]]) -> None:
    known = [(s["step"], s["mean_reward"]) for s in steps if s["mean_reward"] is not None]
    at, rewards = [step for step, _ in known], [reward for _, reward in known]
    axis.plot(at, rewards, color="tab:blue", alpha=0.35, label="mean reward of the step's samples")
    means = [_mean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    axis.plot(at, means, color="tab:blue", label="mean of the last 5 steps")
    _plot_evaluations(axis, run)
    axis.set_ylabel("reward, accuracy")
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left")


def _plot_evaluations(axis: Any, run: Run) -> None:
    """Draw the accuracy of held_out as marks, and pass@1 of every other dataset as a line of its own."""
    found: dict[str, list[evaluation.EvalResult]] = {}
    for result in evaluation.results(run):
        found.setdefault(result.profile, []).append(result)
    for number, results in enumerate(found.values(), start=3):
        first = results[0]
        at, values = [r.step for r in results], [r.accuracy for r in results]
        if first.dataset == HELD_OUT:
            marker, name = ("^", "greedy") if first.is_greedy else ("o", "temperature 1")
            axis.plot(at, values, marker, color="tab:green", label=f"held-out accuracy, {name}")
        else:
            style = "^--" if first.is_greedy else "o-"
            name = f"{first.dataset}, greedy" if first.is_greedy else first.dataset
            colour = f"C{number % 10}"  # the first ones are those of the reward and of held_out
            axis.plot(at, values, style, color=colour, linewidth=0.8, markersize=4, label=f"pass@1, {name}")


def _plot_loss(axis: Any, run: Run, steps: list[dict[str, Any]]) -> None:
    stages = (("sft", "tab:gray", "supervised loss"), ("grpo", "tab:red", "policy loss"))
    for objective, colour, name in stages:
        shown = [s for s in steps if s["objective"] == objective and s["loss"] is not None]
        if not shown:
            continue
        own = axis if objective == "sft" else axis.twinx()
        own.plot([s["step"] for s in shown], [s["loss"] for s in shown], color=colour)
        own.set_ylabel(name, color=colour)
    if run.config.warm_start.steps:
        axis.axvline(run.config.warm_start.steps + 0.5, color="black", linewidth=0.8, linestyle="--")
    axis.set_xlabel("step (the dashed line: GRPO begins)")
    axis.grid(alpha=0.3)


def sparkline(values: list[float | None], *, width: int = 60) -> str:
    """Return the values as a row of bars, the lowest value lowest."""
    known = [v for v in values if v is not None][-width:]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    return "".join(BAR[round((v - low) / span * (len(BAR) - 1))] for v in known)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shown(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"
