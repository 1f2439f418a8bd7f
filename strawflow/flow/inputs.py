"""What a run needs before its workers can do anything: missing input is refused at the start, not waited for."""

from __future__ import annotations

from strawflow.config import refuse_deadlocks, refuse_senseless
from strawflow.config_algorithm import refuse_single_samples
from strawflow.errors import ConfigError
from strawflow.flow.admit import DEMONSTRATIONS
from strawflow.flow.run import Run
from strawflow.index import datasets


def require(run: Run) -> None:
    """Refuse a run whose datasets or model are missing, or whose settings could never fill a batch.

    Raises:
        ConfigError: names what is missing and the command that brings it, or shows the arithmetic.
    """
    refuse_deadlocks(run.config)
    refuse_senseless(run.config)
    assemble = run.config.assemble
    if not (assemble.post_process or assemble.convert):  # these may give advantages of their own
        refuse_single_samples(run.config.algorithm, samples_per_prompt=run.config.rollout.samples_per_prompt)
    needed = [DEMONSTRATIONS] if run.config.warm_start.steps else []
    # One without weight may be given some by a curriculum; what it is then drawn from is looked at then.
    needed += [one.name for one in run.config.prompt_sets() if one.weight > 0 and not one.source]
    with run.index.read() as connection:
        for dataset_id in needed:
            if not datasets.segments_of(connection, dataset_id):
                raise ConfigError(
                    f"{run.root} has no {dataset_id} yet: `strawflow enqueue {run.root} FILE --dataset {dataset_id}`"
                )
    if not run.config.model.path:
        raise ConfigError(
            "model.path is empty: our workers train the Hugging Face checkpoint folder that `strawflow run create "
            "--model.path FOLDER` names; a run made without one goes on in the programs that made it"
        )
    if not (run.model_path / "config.json").exists():
        raise ConfigError(
            f"model.path must name a Hugging Face checkpoint folder; {run.model_path} has no config.json"
        )
