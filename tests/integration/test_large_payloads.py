"""Long responses pass the whole durable path: completed, assembled, packed and read back with every token in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strawflow.flow import assemble, complete, consume
from strawflow.flow.trajectory import Member, UnitResult
from strawflow.testing.invariants import check_exactly_once
from strawflow.testing.runs import small_run
from strawflow_workers.assemble.groups import Group
from strawflow_workers.assemble.packing import build_batch
from strawflow_workers.trainer.team import to_mini_batches


def long_member(unit_id: int, member: int, version: str, num_tokens: int) -> Member:
    rng = np.random.Generator(np.random.PCG64([unit_id, member]))
    return Member(
        member=member,
        status="finished",
        response_tokens=rng.integers(0, 150_000, num_tokens).tolist(),
        logprobs=(-rng.random(num_tokens, dtype=np.float32)).tolist(),
        token_versions=[version] * num_tokens,
        finish_reason="stop",
        reward=float(member % 2),
    )


def pass_through(folder: Path, *, num_units: int, num_members: int, num_tokens: int) -> None:
    """Complete, plan and read back one step of long responses; every array must come back equal."""
    settings = {
        "rollout.prompts_per_step": str(num_units),
        "rollout.samples_per_prompt": str(num_members),
        "assemble.max_tokens_per_micro_batch": str(4 * num_tokens),
    }
    with small_run(folder, num_prompts=num_units, settings=settings) as small:
        version = small.serving()
        assert version is not None
        grants = small.claim(num_units)
        for grant in grants:
            members = [long_member(grant.unit_id, m, version, num_tokens) for m in range(num_members)]
            result = UnitResult(grant.unit_id, grant.fence, 1, [1, 2, 3], members, grant.profile, "made up")
            complete.complete(small.session("rollout"), [result], submission_id=f"long-{grant.unit_id}")
        session = small.session("assemble")
        role = small.assembler()
        offered = assemble.offered(session, purpose="train", limit=num_units)
        rows = assemble.read_trajectories(session, offered)
        groups = [Group(u, rows[u.unit_id].to_pylist()) for u in offered]
        plan = build_batch(
            groups, step=1, objective="grpo", version_steps={version: 0}, config=small.run.config
        )
        batch = assemble.plan_batch(session, role, plan)
        assert batch.num_tokens == num_units * num_members * (num_tokens + 3)
        read = list(consume.read_batch(small.run, session.reader, batch))
        seen = 0
        for _, packed in read:
            for row in range(packed.num_rows):
                unit_id, member = (packed.column(c)[row].as_py() for c in ("unit_id", "member"))
                expected = long_member(unit_id, member, version, num_tokens)
                tokens = packed.column("tokens")[row].values.to_numpy()
                logprobs = packed.column("logprobs")[row].values.to_numpy()
                assert np.array_equal(tokens[3:], np.array(expected.response_tokens, np.int32))
                assert np.array_equal(logprobs[3:], np.array(expected.logprobs, np.float32))
                seen += 1
        assert seen == num_units * num_members
        assert sum(len(m.micro_batches) for m in to_mini_batches(batch, iter(read))) == len(read)
        check_exactly_once(small.run, finished=False)


def test_responses_of_twenty_thousand_tokens_pass(tmp_path: Path) -> None:
    pass_through(tmp_path, num_units=2, num_members=2, num_tokens=20_000)


@pytest.mark.long
def test_two_million_tokens_in_responses_of_64_thousand_pass(tmp_path: Path) -> None:
    pass_through(tmp_path, num_units=8, num_members=4, num_tokens=64_000)
