"""Rewards: verifiers run in killable processes, so that no grader can stop, slow or end the rollout worker.

`RewardPool` is the way in; `RewardSpec` names the verifier, `RewardRequest` and `RewardOutcome` are what goes in and out.
"""
