"""A small real run, moved on step by step by the flow's own verbs: for tests of whatever looks at runs.

1. Nothing is mocked: prompts are enqueued from a file, units claimed and completed, batches planned, checkpoints committed.
   Only the tokens, rewards and weight files are made up, from the ids alone, so that two runs hold equal rows.
2. Each verb leaves a run in a state that a real one passes through; a test stops where it wants.
3. It knows no model: the "weights" are one small file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors.numpy import save_file

from strawflow.config import RunConfig, load_config
from strawflow.errors import ConflictError
from strawflow.flow import admit, assemble, consume, enqueue, publish_weights
from strawflow.flow import claim as claiming
from strawflow.flow import complete as completing
from strawflow.flow.assemble import BatchPlan, PackedMicroBatch
from strawflow.flow.claim import Grant, PromptShelf
from strawflow.flow.complete import Receipt
from strawflow.flow.consume import Resumption
from strawflow.flow.mixture import NO_HOOKS, Hooks
from strawflow.flow.run import Run, create_run, write_durably
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import PARTIAL, Member, UnitResult, failed_member
from strawflow.ids import new_id
from strawflow.index import weights
from strawflow.index.batches import Batch
from strawflow.index.consumers import Assignment, Role
from strawflow.index.units import Unit
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
from strawflow.records import BATCH, PLAN
from strawflow.weights.verify import FORMAT, MANIFEST, WEIGHTS_FILE, describe_file, weights_digest

KEYS = PromptKeys("prompt", "label", "metadata")

SMALL: Mapping[str, str] = {
    "run.durability": "process",
    "rollout.engine": "fake",
    "rollout.prompts_per_step": "4",
    "rollout.samples_per_prompt": "2",
    "rollout.max_staleness": "1",
    "trainer.steps": "3",
    "trainer.checkpoint_interval": "1",
    "assemble.mini_batches": "1",
    "lease.ttl_s": "60",
}


def prompt_lines(num_prompts: int, *, first: int = 0) -> str:
    """Return JSON Lines of made-up sums, each with label and metadata."""
    rows = [
        {"prompt": f"What is {n} + {n}?", "label": str(2 * n), "metadata": {"number": n}}
        for n in range(first, first + num_prompts)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def small_config(settings: Mapping[str, str] | None = None) -> RunConfig:
    """Return the configuration of a small run; `settings` maps section.field to text."""
    return load_config(flags={**SMALL, **(settings or {})})


@dataclass
class SmallRun:
    """A run and the sessions that act in it; use as a context manager, or call `close`."""

    run: Run
    sessions: dict[str, WorkerSession] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    resumption: Resumption | None = None
    hooks: Hooks = NO_HOOKS
    """What an admission calls."""

    def __enter__(self) -> SmallRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every session that still lives and close the index."""
        for session in self.sessions.values():
            session.end()
        self.sessions.clear()
        self.run.close()

    def session(self, kind: str) -> WorkerSession:
        """Return the live session of this kind, started when first asked for."""
        if kind not in self.sessions:
            self.sessions[kind] = WorkerSession(self.run, kind)
        return self.sessions[kind]

    def enqueue(self, path: Path, *, dataset: str = "prompts", purpose: str = "train") -> int:
        """Enqueue a prompt file; returns how many rows were new."""
        request = enqueue.EnqueueRequest(dataset, purpose, PromptSource(path), KEYS)
        return enqueue.enqueue(self.session("enqueue"), request).num_added

    def trainer(self) -> Role:
        """Be the trainer, once: take the consumer over."""
        if "train" not in self.roles:
            taken = consume.take_over(self.session("train"))
            if taken is None:
                raise ConflictError("another live session is the trainer")
            self.resumption, self.roles["train"] = taken, taken.role
        return self.roles["train"]

    def assembler(self) -> Role:
        """Be the assembler, once."""
        if "assemble" not in self.roles:
            taken = assemble.take_role(self.session("assemble"))
            if taken is None:
                raise ConflictError("another live session is the assembler")
            self.roles["assemble"] = taken
        return self.roles["assemble"]

    def publish(self, step: int, *, content: str | None = None, admit_due: bool = True) -> str:
        """Publish made-up weights of a step and, unless told not to, admit what they allow; returns their id.

        Equal `content` (default: the step) makes equal weights.
        """
        role = self.trainer()
        values = np.frombuffer((content or f"step {step}").encode(), np.uint8)
        made = self.run.root / "made-up.safetensors"
        save_file({"made_up": values}, made)
        digest = weights_digest(made)
        version_id = publish_weights.version_name(self.run, role, step=step, digest=digest)
        folder = self.run.root / publish_weights.weights_path(version_id)
        folder.mkdir(parents=True)
        made.rename(folder / WEIGHTS_FILE)
        publish_weights.publish_weights(
            self.session("train"), role, step=step, version_id=version_id, digest=digest
        )
        if admit_due:
            admit.admit_due(self.session("train"), self.hooks)
        return version_id

    def serving(self) -> str | None:
        """Return the id of the newest published weights."""
        with self.run.index.read() as connection:
            newest = weights.newest(connection, self.run.branch)
        return None if newest is None else newest.version_id

    def claim(self, limit: int, *, purposes: Sequence[str] | None = None) -> list[Grant]:
        """Lease up to `limit` units to the rollout session."""
        session = self.session("rollout")
        shelf = PromptShelf(session)
        return claiming.claim(
            session, shelf, limit=limit, serving_version_id=self.serving(), purposes=purposes
        )

    def complete(self, grants: Sequence[Grant], *, submission_id: str | None = None) -> Receipt:
        """Complete leased units with made-up answers."""
        version = self.serving() or ""
        results = [made_up_result(grant, version) for grant in grants]
        return completing.complete(
            self.session("rollout"), results, submission_id=submission_id or new_id("submission")
        )

    def sample(self, limit: int = 1000, *, purposes: Sequence[str] | None = None) -> int:
        """Claim and complete up to `limit` units; returns how many."""
        grants = self.claim(limit, purposes=purposes)
        if grants:
            self.complete(grants)
        return len(grants)

    def plan(self, *, purpose: str = "train") -> Batch | None:
        """Plan the next batch of whole groups; None while too few are offered."""
        role, session = self.assembler(), self.session("assemble")
        wanted = self.run.config.rollout.prompts_per_step
        groups = assemble.offered(session, purpose=purpose, limit=wanted)
        if len(groups) < wanted:
            return None
        step = assemble.last_planned(session) + 1
        rows = assemble.read_trajectories(session, groups)
        return assemble.plan_batch(session, role, made_up_plan(step, groups, rows))

    def train(self, step: int) -> None:
        """Apply a planned step: record it, commit its checkpoint, publish its weights."""
        role, session = self.trainer(), self.session("train")
        consume.record_step(session, role, step=step, metrics={"loss": 1.0 / step, "grad_norm": 0.5})
        state_digest = self.write_checkpoint(step)
        consume.commit_checkpoint(session, role, step=step, previous_step=step - 1, state_digest=state_digest)
        self.publish(step)

    def write_checkpoint(self, step: int) -> str:
        """Write the files of a step's checkpoint, which no row names yet; returns its state's digest."""
        role = self.trainer()
        folder = self.run.root / consume.checkpoint_path(role, step)
        folder.mkdir(parents=True)
        write_durably(folder / "state", str(step).encode())
        state_digest = f"{step:032x}"
        manifest = {
            "format": FORMAT,
            "files": {"state": describe_file(folder / "state")},
            "stands_for": {**consume.stands_for(self.run, role, step=step), "state_digest": state_digest},
        }
        write_durably(folder / MANIFEST, json.dumps(manifest).encode())
        return state_digest

    def advance(self, num_steps: int) -> None:
        """Go through whole steps: sample what is admitted, plan, train."""
        for _ in range(num_steps):
            self.sample()
            batch = self.plan()
            if batch is None:
                raise ConflictError("too few groups are offered for a batch")
            self.train(batch.step)


def small_run(
    folder: Path, *, num_prompts: int = 16, settings: Mapping[str, str] | None = None, name: str = "small"
) -> SmallRun:
    """Create a run in `folder` with `num_prompts` enqueued prompts and the initial weights published.

    The first groups are admitted: `rollout.prompts_per_step` for each step that staleness allows.
    """
    made = SmallRun(create_run(folder / name, small_config(settings)))
    path = folder / f"{name}-prompts.jsonl"
    path.write_text(prompt_lines(num_prompts), encoding="utf-8")
    made.enqueue(path)
    made.publish(0)
    return made


def made_up_result(grant: Grant, version_id: str, *, failed: Sequence[int] = ()) -> UnitResult:
    """Return answers for a leased unit: member m has m + 2 tokens and reward m % 2; members in `failed` failed."""
    members = [
        failed_member(m, "the reward raised ValueError")
        if m in failed
        else Member(
            member=m,
            status="finished",
            response_tokens=tuple(range(10, 12 + m)),
            logprobs=tuple(-0.1 * (t + 1) for t in range(m + 2)),
            token_versions=(version_id,) * (m + 2),
            finish_reason="stop",
            reward=float(m % 2),
            score=float(m % 2),
            response_text=f"answer {m} of unit {grant.unit_id}",
        )
        for m in range(grant.profile.num_samples)
    ]
    return grant.result(members, prompt_tokens=(1, 2, 3), engine="fake/0")


def made_up_progress(grant: Grant, version_id: str, *num_tokens: int) -> UnitResult:
    """Return how far a leased unit has come: member m is partial with `num_tokens[m]` tokens, 100 * m and up."""
    members = [
        Member(
            member=m,
            status=PARTIAL,
            response_tokens=tuple(range(100 * m, 100 * m + num)),
            logprobs=tuple(-0.25 * (t + 1) for t in range(num)),
            token_versions=(version_id,) * num,
            finish_reason="abort",
            reward=None,
        )
        for m, num in enumerate(num_tokens)
    ]
    return grant.result(members, prompt_tokens=(1, 2, 3), engine="fake/0")


def made_up_plan(step: int, groups: Sequence[Unit], rows: Mapping[int, pa.RecordBatch]) -> BatchPlan:
    """Return a plan that trains every finished member of `groups` in one micro-batch."""
    members = [row for unit in groups for row in rows[unit.unit_id].to_pylist() if row["status"] != "failed"]
    packed = [_packed(step, row) for row in members]
    plan = [_planned(step, row) for row in members]
    rewards = [row["reward"] for row in members if row["reward"] is not None]
    return BatchPlan(
        step=step,
        objective="grpo",
        micro_batches=[PackedMicroBatch(0, 0, 0, pa.RecordBatch.from_pylist(packed, schema=BATCH))],
        plan=pa.RecordBatch.from_pylist(plan, schema=PLAN),
        denominators=(float(sum(len(row["response_tokens"]) for row in members)),),
        assignments=[Assignment(unit.epoch, unit.unit_id, "trained") for unit in groups],
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        max_staleness=0,
    )


def _packed(step: int, row: Mapping[str, object]) -> dict[str, object]:
    prompt, response, logprobs = (list(row[n]) for n in ("prompt_tokens", "response_tokens", "logprobs"))  # type: ignore[call-overload]
    before, num_response = [0] * len(prompt), len(response)
    return {
        **{
            name: row[name]
            for name in ("unit_id", "fence", "seq", "member", "segment", "temperature", "reward")
        },
        "step": step,
        "mini_batch": 0,
        "slice": 0,
        "micro_batch": 0,
        "tokens": prompt + response,
        "loss_mask": before + [1] * num_response,
        "logprobs": [0.0] * len(prompt) + logprobs,
        "advantages": [0.0] * len(prompt) + [0.5] * num_response,
        "version_steps": [-1] * len(prompt) + [step - 1] * num_response,
        "prompt_length": len(prompt),
    }


def _planned(step: int, row: Mapping[str, object]) -> dict[str, object]:
    names = ("unit_id", "fence", "seq", "member", "segment", "reward")
    return {
        **{name: row[name] for name in names},
        "step": step,
        "outcome": "trained",
        "reason": None,
        "advantage": 0.5,
        "staleness": 0,
        "num_tokens": len(row["response_tokens"]),  # type: ignore[arg-type]
        "mini_batch": 0,
        "slice": 0,
        "micro_batch": 0,
    }
