"""Supervised warm start: imitates the environment's expert, or past episodes.

From a checkpoint, or from nothing: then tokenizer and weights are made on
the environment's own text. With `sft.noise` the expert errs at a settable
rate, which gives a policy of a wanted strength for RL to improve on. With
`sft.data` it is a run's own episodes that are imitated, token by token:
rejection-sampling fine-tuning, if only the successful ones are.
"""

import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import ml_collections
import numpy as np

import envs
from envs import base
from gigpo_jax import (
  batch,
  experiment,
  hosts,
  losses,
  tokenizer,
)
from gigpo_jax import (
  config as config_lib,
)
from gigpo_jax.models import huggingface, lora, qwen

if TYPE_CHECKING:
  from gigpo_jax import episodes

_REPORT_SECS = 10.0  # between two lines on how many episodes there are


# In a work directory of launch/train.py.
_OF_A_RUN = ('checkpoints', 'config.json')


def warm_start(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Trains by imitation; writes `workdir`/policy, a Hugging Face directory.

  A function of the config alone: the same command makes the same policy. Of
  several processes (see `hosts`) the first one writes; `workdir` has to be one
  folder for all.

  Raises:
    ValueError: in one line, if the config cannot work, or there is no expert
      or no episode to imitate.
  """
  scratch = config.sft.init == 'scratch'
  config_lib.validate(config, needs_model=not scratch)
  kept = _open(config) if config.sft.data else None
  config_lib.check_workdir(workdir)
  there = (pathlib.Path(workdir) / name for name in _OF_A_RUN)
  if any(path.exists() for path in there):
    raise ValueError(
      f'--workdir={workdir}: holds a run of launch/train.py; must be another '
      'folder'
    )
  hosts.join()
  with hosts.locked(workdir), experiment.disk(workdir):
    pairs = [] if kept else demonstrations(config)
    _warm_start(config, workdir, pairs, kept)


def _warm_start(
  config: ml_collections.ConfigDict,
  workdir: str,
  pairs: list[tuple[str, str]],
  kept: 'episodes.EpisodeSet | None',
) -> None:
  directory = pathlib.Path(workdir) / 'policy'
  start = pathlib.Path(workdir) / 'start'
  scratch = config.sft.init == 'scratch'
  if scratch:
    with config.unlocked():
      config.model.path = str(start)
    if hosts.first():
      texts = (text for pair in pairs for text in pair)
      tokenizer.train(texts, str(start), vocab_size=config.sft.vocab_size)
      _write_random_model(config, str(start))
    hosts.tell_all(None)  # All wait until it is there.
  policy = experiment.make_policy(config)
  if kept:
    rows = episode_rows(config, policy.tokenizer, kept)
  else:
    rows = demonstration_rows(config, policy.tokenizer, pairs)
  hosts.say(f'{rows.real.sum()} steps to imitate, {rows.lengths.sum()} tokens')
  with jax.set_mesh(policy.mesh):
    params = _imitate(config, policy, rows, workdir)
    with hosts.whole(directory) as folder:
      huggingface.save(
        folder,
        policy.model,
        params,
        tokenizer_directory=policy.tokenizer.directory,
      )
  if scratch and hosts.first():
    shutil.rmtree(start)
  hosts.say(f'warm start: {directory}')


def demonstrations(config: ml_collections.ConfigDict) -> list[tuple[str, str]]:
  """Returns (prompt, response) of every step of the expert's episodes."""
  env = envs.make(config.env.name, **config_lib.env_kwargs(config))
  if not hasattr(env, 'demonstrate'):
    raise ValueError(f'env.name={config.env.name}: has no expert to imitate')
  available = len(
    envs.tasks(config.env.name, 'train', **config_lib.env_kwargs(config))
  )
  pairs = []
  total = config.sft.num_episodes
  begin = reported = time.monotonic()
  for episode in hosts.bar(range(total), desc='expert episodes'):
    # From the far end: RL draws other games than these, mostly.
    task = base.Task('train', available - 1 - episode % available)
    pairs += env.demonstrate(task, noise=config.sft.noise, seed=config.seed)
    now = time.monotonic()
    if now - reported >= _REPORT_SECS:
      reported = now
      hosts.say(
        f'{episode + 1} of {total} expert episodes, {now - begin:.0f} s'
      )
  env.close()
  return pairs


def demonstration_rows(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  pairs: list[tuple[str, str]],
) -> batch.Rows:
  """Returns demonstrations as rows; each its own episode.

  Unless `sft.completion_only`, a row's completion is all but its first token.
  """
  prompts = text.fit(
    [prompt for prompt, _ in pairs],
    [prompt for prompt, _ in pairs],
    max_tokens=config.rollout.max_prompt_tokens,
    policy='truncate_left',
  )
  end = text.end_of_turn
  responses = [
    np.concatenate([ids, end])
    for ids in text.encode([response for _, response in pairs])
  ]
  limit = config.rollout.max_completion_tokens
  longest = max(len(ids) for ids in responses)
  if longest > limit:
    raise ValueError(
      f'rollout.max_completion_tokens={limit}: an expert response has '
      f'{longest} tokens; must be at least that'
    )
  return _rows(config, [ids for ids, _ in prompts], responses)


def episode_rows(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  kept: 'episodes.EpisodeSet',
) -> batch.Rows:
  """Returns the steps of episodes as rows, of the tokens that were sampled.

  Raises:
    ValueError: in one line, if the tokens are another tokenizer's, or too many
      in a step, or no episode is as wanted.
  """
  field = f'sft.data={config.sft.data}'
  if kept.fingerprint != text.fingerprint:
    raise ValueError(
      f'{field}: made with another tokenizer ({kept.fingerprint}) than that of '
      f'model.path={config.model.path} ({text.fingerprint}); tokens are taken '
      'as they were sampled; must be the same'
    )
  steps = [
    step
    for episode in kept
    if episode['success'] or not config.sft.only_successful
    for step in episode['steps']
    if not step['is_last']
  ]
  if not steps:
    raise ValueError(
      f'{field}: no episode of {len(kept.source)} was successful; '
      'sft.only_successful=False takes all'
    )
  columns = []
  for name in ('prompt', 'completion'):
    columns.append([step[f'{name}_ids'] for step in steps])
    limit = config.rollout[f'max_{name}_tokens']
    longest = max(len(ids) for ids in columns[-1])
    if longest > limit:
      raise ValueError(
        f'rollout.max_{name}_tokens={limit}: a step of {config.sft.data} has '
        f'{longest}; must be at least that'
      )
  return _rows(config, *columns)


def _open(config: ml_collections.ConfigDict) -> 'episodes.EpisodeSet':
  # Slow to import, and only needed for this.
  from gigpo_jax import episodes

  if config.sft.init:
    raise ValueError(
      f'sft.init={config.sft.init}: the tokens of sft.data are those of the '
      "policy that sampled them; must be '' (--config.sft.init=)"
    )
  try:
    return episodes.open_set(config.sft.data)
  except ValueError as error:
    raise ValueError(f'sft.data={error}') from error


def _rows(
  config: ml_collections.ConfigDict,
  inputs: list[np.ndarray],
  responses: list[np.ndarray],
) -> batch.Rows:
  """Returns prompts and responses as rows, each its own episode."""
  if not config.sft.completion_only:
    responses = [
      np.concatenate([prompt[1:], response])
      for prompt, response in zip(inputs, responses, strict=True)
    ]
    inputs = [prompt[:1] for prompt in inputs]
  max_prompt, max_completion = _widths(config)
  return batch.pack(
    inputs,
    responses,
    max_prompt_tokens=max_prompt,
    max_completion_tokens=max_completion,
    row_multiple=config.sft.minibatch_rows,
  )


def _widths(config: ml_collections.ConfigDict) -> tuple[int, int]:
  """Returns the most tokens that are given and that are learnt, in a row."""
  given = config.rollout.max_prompt_tokens
  learnt = config.rollout.max_completion_tokens
  if config.sft.completion_only:
    return given, learnt
  return 1, given + learnt - 1


def _write_random_model(
  config: ml_collections.ConfigDict, directory: str
) -> None:
  text = tokenizer.Tokenizer(directory)
  shape = config.sft.model
  model = qwen.QwenConfig(
    vocab_size=text.vocab_size,
    hidden_size=shape.width,
    intermediate_size=shape.mlp,
    num_layers=shape.layers,
    num_heads=shape.heads,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.width // shape.heads,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    dtype=config.model.dtype,
    remat=config.model.remat,
  )
  params = qwen.init(model, jax.random.key(config.seed))
  huggingface.save(directory, model, params, dtype='float32')


def _imitate(
  config: ml_collections.ConfigDict,
  policy: experiment.Policy,
  rows: batch.Rows,
  workdir: str,
) -> dict:
  with config.unlocked():
    config.optimizer.learning_rate = config.sft.learning_rate
    config.optimizer.warmup_updates = config.sft.warmup_updates
    updates = -(-int(rows.real.sum()) // config.sft.minibatch_rows)
    if config.sft.decay:
      config.optimizer.decay_updates = config.sft.epochs * updates
    config.learner.minibatch_rows = config.sft.minibatch_rows
    config.loss.corridor_weight = 0.0
    widths = _widths(config)
    config.rollout.max_prompt_tokens = widths[0]
    config.rollout.max_completion_tokens = widths[1]
  learner = experiment.make_learner(config, policy, losses.supervised)
  state = learner.init(policy.load())
  writer = experiment.make_writer(config, workdir)
  parts = list(_parts(config, rows))
  for number, (epoch, index) in enumerate(hosts.bar(parts, desc='imitation')):
    part = rows.take(index)
    state, values = learner.update(
      state,
      part,
      np.zeros(len(index), np.float32),
      old_log_probs=part.sampler_log_probs,
      ref_log_probs=None,
      iteration=number,
    )
    writer.write(number, values | {'update/epoch': float(epoch)})
    hosts.say(
      f'part {number + 1} of {len(parts)}: loss {values["loss/total"]:.4f}'
    )
  writer.close()
  return lora.join(learner.base, state.params)


def _parts(
  config: ml_collections.ConfigDict, rows: batch.Rows
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (epoch, rows) between two lines of metrics."""
  real = np.flatnonzero(rows.real)
  for epoch in range(config.sft.epochs):
    order = np.random.default_rng(epoch).permutation(real)
    for start in range(0, len(order), config.sft.report_rows):
      yield epoch, order[start : start + config.sft.report_rows]
