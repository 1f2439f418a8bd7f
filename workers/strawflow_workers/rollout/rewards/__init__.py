"""Rewards: what a response is worth, or why that is not known. No grader can stop, slow or end the rollout worker.

`RewardScorer` (scorer) is the way in; `RewardSpec`, `RewardRequest` and `RewardOutcome` (spec) are what goes in and out.

    names       strawflow.reward_names      which reward a name means; what a row may name
    verifiers   verifiers                   name -> function; then one file each: text_match (exact, f1), math_answer,
                                            multiple_choice, instructions, gym, code_tests with sandbox; boxed
    processes   pool                        lanes and their processes: backlog, batch_run, process; calls and frames on the
                                            wire; worker is the program inside
    servers     reward_server               one HTTP request with its retries; remote and reward_model say what is asked
    members     members                     from sampled members to rewarded ones
    by hand     check                       `strawflow reward check`
"""
