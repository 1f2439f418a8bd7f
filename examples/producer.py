"""A durable generator: leases prompt groups, answers them, hands the answers in. Kill it at any instant and start it again.

python examples/producer.py RUN
"""

import sys

import strawflow

with strawflow.open(sys.argv[1]) as store, store.worker("generator") as worker:
    store.rescue()  # what an earlier, killed process held is offered again
    while grants := worker.claim(8):
        results = []
        for grant in grants:
            members = [
                strawflow.Member(
                    member=n,
                    status="finished",
                    response_tokens=[ord(letter) for letter in reversed(grant.prompt.prompt)],
                    logprobs=[-0.1] * len(grant.prompt.prompt),
                    token_versions="",  # the weights that sampled it, once a trainer publishes some
                    finish_reason="stop",
                    reward=float(n),
                )
                for n in range(grant.profile.num_samples)
            ]
            results.append(grant.result(members))
        print("completed", worker.complete(results).accepted)
