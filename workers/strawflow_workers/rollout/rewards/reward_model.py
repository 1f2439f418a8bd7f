"""The reward `reward_model:URL`: a scalar reward model that SGLang serves (0.5.23: `--is-embedding`, route /classify).

1. What it reads are the very token ids that were sampled, prompt and response, so nothing is tokenised anew; the reward model must
   have the policy's vocabulary then: an id beyond its own ends SGLang's server. As text (`reward_model_input = "text"`) its own
   tokenizer reads prompt and response, which only text prompts allow: the template of another model's chat is not known here.
2. /classify answers {"embedding": [...]}: what the model's head gives for the last token. One number is the score; more
   are a failure, as a classifier's labels or an embedding are no reward.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from strawflow.errors import ConfigError
from strawflow_workers.rollout.rewards.calls import Value, finite_number
from strawflow_workers.rollout.rewards.reward_server import RewardServerError, RewardServers
from strawflow_workers.rollout.rewards.spec import RewardRequest

log = logging.getLogger(__name__)

Input = Literal["tokens", "text"]


async def check(servers: RewardServers, url: str) -> None:
    """Look whether the server is one of a reward model; one that does not answer yet is only told.

    Raises:
        ConfigError: it generates.
    """
    try:
        found = await servers.get(f"{url}/model_info")
    except RewardServerError as error:
        log.warning("reward_model:%s does not answer (yet): %s", url, error)
        return
    if not isinstance(found, dict) or found.get("is_generation", True):
        raise ConfigError(
            f"reward_model:{url}: the server there generates, it does not score; start it with a reward model and --is-embedding"
        )


async def score(servers: RewardServers, url: str, request: RewardRequest, *, what: Input) -> Value:
    """Return the reward model's number for a response, or why there is none."""
    try:
        answer = await servers.post(f"{url}/classify", _body(request, what))
        return _number(answer)
    except RewardServerError as error:
        return str(error)
    except (TypeError, ValueError) as error:
        return f"{url}: {error}"


def _body(request: RewardRequest, what: Input) -> dict[str, Any]:
    if what == "tokens":
        if not len(request.response_tokens):
            raise ValueError("the sample has no token ids; set rollout.reward_model_input to 'text'")
        return {"input_ids": [int(token) for token in (*request.prompt_tokens, *request.response_tokens)]}
    if request.prompt_is_messages:
        raise ValueError("a prompt of chat messages has no text; set rollout.reward_model_input to 'tokens'")
    return {"text": request.prompt + request.response_text}


def _number(answer: Any) -> float:
    if not isinstance(answer, dict) or not isinstance(answer.get("embedding"), list):
        raise ValueError("the answer holds no list 'embedding', as SGLang's /classify gives")
    found = answer["embedding"]
    if len(found) != 1:
        raise ValueError(f"the model gives {len(found)} numbers for a response; a reward model gives one")
    return finite_number(found[0])
