"""Rounds of rejection sampling: sample, keep successes, train on them, repeat.

Each round plays training tasks with the policy of the round before, and trains
this policy on the successful episodes, token by token (RFT, arXiv:2308.01825,
in rounds, as in ReST, arXiv:2308.08998).
"""

import pathlib

import jax
import ml_collections

from gigpo_jax import (
  builders,
  episodes,
  evaluation,
  group_filter,
  metrics,
  rollout,
  sft,
)
from gigpo_jax import config as config_lib
from gigpo_jax.run import model_builders, run_config
from gigpo_jax.runtime import console, distributed, errors

_STORED = 'rounds.json'  # The config of the rounds.
# Patterns of the folders of rounds.
_ROUNDS = ('round-*',)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Runs the rounds; each writes `workdir`/round-N/episodes and .../policy.

  Line N of metrics.jsonl is about the episodes of round N, counted from 0, and
  about the evaluation of the policy that sampled them. The same command resumes
  after the last complete round; a round depends only on the config, which is in
  rounds.json.

  Raises:
    ValueError: in one line, if the config is invalid, the folder holds rounds
      of another config, or no episode of a round was successful.
  """
  if config.sft.init or config.sft.data:
    raise ValueError(
      f'sft.rounds={config.sft.rounds}: starts from model.path and its own '
      f'episodes; sft.init={config.sft.init} and sft.data={config.sft.data} '
      "must be ''"
    )
  if config.tasks.draw == 'uncertain':
    raise ValueError(
      'tasks.draw=uncertain: depends on outcomes, of which a round has none; '
      'must be epochs or stages'
    )
  config_lib.validate(config)
  sft.check_run(config, workdir, _STORED, _ROUNDS)
  inputs = model_builders.describe_files(config)
  run_config.check_resume(
    config,
    workdir,
    name=_STORED,
    length='sft.rounds',
    results=_ROUNDS,
    inputs=inputs,
  )
  root = pathlib.Path(workdir)

  def is_complete(index: int) -> bool:
    return (root / f'round-{index}' / 'policy').is_dir()

  distributed.initialize()
  if is_complete(config.sft.rounds - 1):
    console.log(f'{workdir}: all {config.sft.rounds} rounds are complete')
  with distributed.lock(workdir), errors.explain_disk_errors(workdir):
    if distributed.is_main_process():
      run_config.save(config, workdir, _STORED, inputs=inputs)
    last = max(filter(is_complete, range(config.sft.rounds)), default=-1)
    if last >= 0:
      config.model.path = str(root / f'round-{last}' / 'policy')
    for index in range(last + 1, config.sft.rounds):
      folder = root / f'round-{index}'
      own = config.copy_and_resolve_references()
      own.sft.data = str(folder / episodes.FOLDER)
      # What a killed round has left is replaced after the rollouts.
      episodes.check_folder(folder / episodes.FOLDER)
      values = sample(own, folder, index)
      # A kill during the training of a round leaves its line.
      writer = builders.make_writer(config, workdir, index, 1)
      writer.write(index, values)
      writer.close()
      console.log(metrics.console_line(index, values))
      sft.warm_start(own, str(folder))
      config.model.path = str(folder / 'policy')


def sample(
  config: ml_collections.ConfigDict, folder: pathlib.Path, index: int
) -> dict[str, float]:
  """Writes the episodes of a round to `folder`/episodes; returns metrics."""
  bundle = model_builders.make_model_bundle(config)
  count = config.sft.rollouts
  positions = range(index * count, (index + 1) * count)
  stream = builders.make_task_sampler(config)
  with (
    jax.set_mesh(bundle.mesh),
    builders.open_pool(config, bundle.tokenizer) as pool,
    builders.make_scorer(config) as scorer,
  ):
    runner = builders.make_runner(config, bundle, pool, scorer)
    params = bundle.load()
    bundle.compile_together(params)
    played = {
      position: runner.run(
        params,
        stream.at(position),
        episodes_per_group=config.rollout.episodes_per_group,
        stream=(rollout.TRAIN, position),
        sampling=model_builders.make_sampling(config),
        max_turns=group_filter.max_turns(config.rollout.horizon, position),
        label=f'round {index}',
      )
      for position in positions
    }
    together = [t for part in played.values() for t in part]
    limit = config.pool.max_failed_share
    metrics.stop_if_failed(together, limit)
    values = metrics.summarize(together, prefix='train')
    if config.evaluation.every:
      (evaluated,) = runner.run_batches(
        params,
        [builders.make_eval_batch(config)],
        label='evaluation',
      )
      metrics.stop_if_failed(evaluated, limit)
      values |= evaluation.summarize(evaluated)
    runner.sampler.release()
  if distributed.is_main_process():
    episodes.write(
      folder / episodes.FOLDER, bundle.tokenizer, played, seed=config.seed
    )
  distributed.barrier()
  return values
