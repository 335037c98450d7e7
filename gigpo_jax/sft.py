"""Supervised fine-tuning on an environment's expert or on recorded episodes.

Starts from a checkpoint, or from scratch: then it trains a tokenizer and
initializes weights on the environment's text. With `sft.noise` the expert errs
at a given rate, which yields a policy of a chosen strength that RL can improve.
With `sft.data` the run imitates the responses of recorded episodes, token by
token. If it uses only successful ones, this is rejection-sampling fine-tuning.
With `sft.loss=dpo` it learns from pairs of recorded episodes; see `preference`.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import ml_collections
import numpy as np

import envs
from envs import base
from gigpo_jax import (
  batch,
  builders,
  conversation,
  losses,
  options,
  preference,
  tokenizer,
)
from gigpo_jax import config as config_lib
from gigpo_jax import learner as learner_lib
from gigpo_jax.models import huggingface, lora, parameters, qwen
from gigpo_jax.programs import update_sums
from gigpo_jax.run import model_builders, policy_files, remat, run_config
from gigpo_jax.runtime import console, distributed, errors

if TYPE_CHECKING:
  from gigpo_jax import episodes

# (observation, response) of each step of an episode. Of the observation, only
# the prompt or the messages and tools matter.
Demonstration = list[tuple[base.Observation, str]]

_STORED = 'sft.json'  # The config of the policy.
_REPORT_SECS = 10.0  # Interval of progress reports on expert episodes.
LOSSES = ('imitation', 'dpo')  # dpo: segment DPO


@dataclasses.dataclass(frozen=True)
class ModelShape:
  """Shape of a new model, `config.sft.model`; see configs/base.py."""

  layers: int = options.number(4, low=1)
  width: int = options.number(128, low=1)
  heads: int = options.number(4, low=1)
  kv_heads: int = options.number(2, low=1)
  mlp: int = options.number(384, low=1)

  def __post_init__(self):
    options.check(self)
    if self.width % (2 * self.heads):
      raise ValueError(
        f'heads={self.heads}: the head size {self.width} / {self.heads} must '
        'be an even integer, for rotary positions'
      )
    if self.heads % self.kv_heads:
      raise ValueError(
        f'kv_heads={self.kv_heads}: must divide sft.model.heads={self.heads}'
      )


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the warm start, `config.sft`; see configs/base.py."""

  loss: str = options.choice('imitation', LOSSES)
  beta: float = options.number(0.1, above=0)
  segment_turns: int = options.number(3, low=1)
  data: str = ''
  rounds: int = options.number(0, low=0)
  rollouts: int = options.number(1, low=1)
  only_successful: bool = True
  num_episodes: int = options.number(2000, low=1)
  noise: float = options.number(0.0, low=0, high=1)
  epochs: int = options.number(1, low=1)
  learning_rate: float = options.number(1e-5, low=0)
  warmup_updates: int = options.number(0, low=0)
  decay: bool = True
  minibatch_rows: int = options.number(128, low=1)
  report_rows: int = options.number(6400, low=1)
  completion_only: bool = True
  init: str = options.choice('', ('', 'scratch'))
  vocab_size: int = options.number(
    1024, low=300, note='bytes and special tokens'
  )
  model: ModelShape = ModelShape()

  def __post_init__(self):
    options.check(self)
    if self.loss == 'dpo':
      preference.check(vars(self))
    elif self.report_rows < self.minibatch_rows:
      raise ValueError(
        f'report_rows={self.report_rows}: an update has '
        f'sft.minibatch_rows={self.minibatch_rows} rows; must be at least that'
      )


def warm_start(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Trains by imitation; writes `workdir`/policy as a Hugging Face model.

  The result depends only on the config: the same command gives the same policy.
  With several processes the main process writes, and `workdir` must be shared
  by all of them.

  Raises:
    ValueError: in one line, if the config is invalid, the folder holds a policy
      of another config, or there is no expert or no episode to imitate.
  """
  scratch = config.sft.init == 'scratch'
  config_lib.validate(
    config, needs_model=not scratch, collects=False, evaluates=False
  )
  episode_set = open_episodes(config) if config.sft.data else None
  check_run(config, workdir, _STORED)
  inputs = {} if scratch else model_builders.describe_files(config)
  run_config.check_resume(
    config,
    workdir,
    name=_STORED,
    length='',
    results=['policy'],
    inputs=inputs,
  )
  distributed.initialize()
  with distributed.lock(workdir), errors.explain_disk_errors(workdir):
    shown = episode_set or demonstrations(config)
    if distributed.is_main_process():
      run_config.save(config, workdir, _STORED, inputs=inputs)
    _warm_start(config, workdir, shown)


def check_run(
  config: ml_collections.ConfigDict,
  workdir: str,
  stored: str,
  results: Sequence[str] = (),
) -> None:
  """Checks that a warm start can be trained in a work directory.

  Args:
    config: the experiment.
    workdir: the folder.
    stored: file with the config of the command, if it ran there before.
    results: patterns of further files and folders that it writes.

  Raises:
    ValueError: in one line, if it cannot.
  """
  if config.lora.agents:
    raise ValueError(
      f'lora.agents={tuple(config.lora.agents)}: the steps to imitate name no '
      'agent; must be () for a warm start'
    )
  if config.lora.rank and config.sft.init == 'scratch':
    raise ValueError(
      f'lora.rank={config.lora.rank}: random weights under the adapters would '
      'stay as they are; must be 0 with sft.init=scratch'
    )
  run_config.check_workdir(workdir)
  if run_config.holds_run(workdir):
    raise ValueError(
      f'--workdir={workdir}: holds a run of launch/train.py; must be another '
      'folder'
    )
  if not config.sft.init:
    policy_files.check_target(config.model.path, workdir)
  if not (pathlib.Path(workdir) / stored).exists():
    names = *policy_files.FOLDERS, 'metrics.jsonl', *results
    policy_files.refuse_existing(workdir, names)


def _warm_start(
  config: ml_collections.ConfigDict,
  workdir: str,
  source: 'list[Demonstration] | episodes.EpisodeDataset',
) -> None:
  distributed.start_devices()
  directory = pathlib.Path(workdir) / 'policy'
  # Hidden, because it is deleted at the end.
  start = pathlib.Path(workdir) / '.start'
  scratch = config.sft.init == 'scratch'
  if scratch:
    with config.unlocked():
      config.model.path = str(start)
    if distributed.is_main_process():
      tokenizer.train(
        _texts(source), str(start), vocab_size=config.sft.vocab_size
      )
      _write_random_model(config, str(start))
    distributed.barrier()
  bundle = model_builders.make_model_bundle(config)
  pairs = None
  if config.sft.loss == 'dpo':
    pairs = pair_rows(config, bundle.tokenizer, source)
    rows = pairs.rows
    console.log(f'{pairs.count} pairs, {rows.lengths.sum()} tokens')
  else:
    rows = imitated_rows(config, bundle.tokenizer, source)
    console.log(
      f'{rows.real.sum()} rows to imitate, {rows.lengths.sum()} tokens'
    )
  learner_lib.check_same_rows(rows)
  with jax.set_mesh(bundle.mesh):
    params = _fit(config, bundle, rows, pairs, workdir)
    with distributed.atomic_directory(directory) as folder:
      huggingface.save(
        folder,
        bundle.model,
        params,
        tokenizer_directory=bundle.tokenizer.directory,
        stop_ids=bundle.tokenizer.stop_ids,
      )
  if scratch and distributed.is_main_process():
    shutil.rmtree(start)
  console.log(f'warm start: {directory}')


def imitated_rows(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  source: 'list[Demonstration] | episodes.EpisodeDataset',
) -> batch.Rows:
  """Returns the expert's steps, or those of recorded episodes, as rows.

  See `demonstration_rows` and `recorded_steps` for errors.
  """
  if config.sft.data:
    return pack_steps(config, recorded_steps(config, text, source))
  return demonstration_rows(config, text, source)


def demonstrations(config: ml_collections.ConfigDict) -> list[Demonstration]:
  """Returns the expert's episodes."""
  if not envs.has_expert(config.env.name):
    raise ValueError(
      f'env.name={config.env.name}: has no expert to imitate; must define '
      'Env.demonstrate, or use sft.data or sft.rounds instead'
    )
  name, kwargs = config.env.name, config_lib.env_kwargs(config)
  available = len(config_lib.list_tasks(config, 'train'))
  shown = []
  total = config.sft.num_episodes
  start = reported = time.monotonic()
  with envs.closing(envs.make_expert(name, **kwargs)) as env:
    for episode in console.progress_bar(range(total), desc='expert episodes'):
      # Tasks from the end of the split overlap little with those that RL draws
      # first.
      task = base.Task('train', available - 1 - episode % available)
      # A task that comes again gets other noise.
      seed = config.seed + episode // available
      noise = config.sft.noise
      if steps := envs.demonstrate(name, env, task, noise=noise, seed=seed):
        shown.append(steps)
      now = time.monotonic()
      if now - reported >= _REPORT_SECS:
        reported = now
        console.log(
          f'{episode + 1} of {total} expert episodes, {now - start:.0f} s'
        )
  if not shown:
    raise ValueError(
      f'env.name={config.env.name}: its expert showed no step; must show at '
      'least one task'
    )
  return shown


def _texts(shown: list[Demonstration]) -> Iterator[str]:
  """Yields the texts of demonstrations."""
  for observation, response in itertools.chain.from_iterable(shown):
    if not observation.messages:
      yield observation.prompt
    yield from observation.tools
    yield from (message.text for message in observation.messages)
    yield response


def demonstration_rows(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  shown: list[Demonstration],
) -> batch.Rows:
  """Returns demonstrations as rows, each step its own episode.

  Without `sft.completion_only`, everything but a row's first token is its
  completion, and a conversation is one row. Prompts beyond the limit are
  treated as in a rollout; a conversation ends before the first.

  Args:
    config: the experiment.
    text: the tokenizer.
    shown: the expert's episodes.

  Raises:
    ValueError: in one line, if a response exceeds the token limit, or a prompt
      with rollout.prompt_overflow=error.
  """
  if config_lib.is_conversation(config):
    prompts, responses = _conversations(config, text, shown)
  else:
    prompts, steps = _fit_prompts(config, text, shown)
    responses = _encode_responses(config, text, steps) if steps else []
  if not prompts:
    raise ValueError(
      f'rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}: every '
      'first prompt is longer; must be larger'
    )
  return _pack_rows(config, prompts, responses)


def _fit_prompts(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  shown: list[Demonstration],
) -> tuple[list[np.ndarray], Demonstration]:
  """Returns the prompts within the limit, and their steps."""
  observations = [o for o, _ in itertools.chain.from_iterable(shown)]
  # All at once, because tokenizers encode batches in parallel.
  fitted = text.fit(
    [o.prompt for o in observations],
    [o.short_prompt for o in observations],
    max_tokens=config.rollout.max_prompt_tokens,
    policy=config.rollout.prompt_overflow,
  )
  if shortened := sum(is_shortened for _, is_shortened in fitted):
    console.log(
      f'{shortened} of {len(fitted)} prompts exceed rollout.max_prompt_tokens'
    )
  prompts, kept, rest = [], [], iter(fitted)
  for steps in shown:
    own = [ids for ids, _ in itertools.islice(rest, len(steps))]
    # An episode ends before a prompt without ids.
    own = list(itertools.takewhile(lambda ids: ids is not None, own))
    prompts += own
    kept += steps[: len(own)]
  return prompts, kept


def _encode_responses(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  steps: Demonstration,
) -> list[np.ndarray]:
  """Returns the completions of steps."""
  responses = [
    np.concatenate([ids, text.end_of_turn])
    for ids in text.encode([response for _, response in steps])
  ]
  limit = config.rollout.max_completion_tokens
  longest = max(len(ids) for ids in responses)
  if longest > limit:
    raise ValueError(
      f'rollout.max_completion_tokens={limit}: an expert response has '
      f'{longest} tokens; must be at least that'
    )
  return responses


def _conversations(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  shown: list[Demonstration],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the prompts and the completions of demonstrated conversations.

  Turns beyond the limit of a prompt are left out. Without
  `sft.completion_only`, only the last turn of a conversation is returned: it
  contains the others.
  """
  limit = config.rollout.max_prompt_tokens
  chat = conversation.Conversations(text, limit, 'end')
  prompts, completions = [], []
  for steps in shown:
    own = _encode_responses(config, text, steps)
    ids = _conversation_prompts(chat, steps, own)
    start = 0 if config.sft.completion_only else max(len(ids) - 1, 0)
    prompts += ids[start:]
    completions += own[start : len(ids)]
  return prompts, completions


def _conversation_prompts(
  chat: conversation.Conversations,
  steps: Demonstration,
  completions: list[np.ndarray],
) -> list[np.ndarray]:
  """Returns the prompts of the turns within the limit of a conversation."""
  prompts, turns = [], []
  for n, (observation, _) in enumerate(steps):
    if n:
      _, response = steps[n - 1]
      last = prompts[-1], completions[n - 1]
      turns.append(conversation.Turn(*last, response, observation.messages))
    ids, _ = chat.prompt(steps[0][0], turns)
    if ids is None:
      break
    prompts.append(ids)
  return prompts


def recorded_steps(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  kept: 'episodes.EpisodeDataset',
) -> list[dict[str, Any]]:
  """Returns the records of the steps to learn from.

  Args:
    config: the experiment.
    text: the tokenizer of the policy.
    kept: the recorded episodes.

  Raises:
    ValueError: in one line, if the tokens are from another tokenizer, a step
      exceeds the token limits, or no episode was successful.
  """
  steps = [
    step
    for episode in kept
    if episode['success'] or not config.sft.only_successful
    for step in episode['steps']
    if not step['is_last']
  ]
  if not steps:
    raise ValueError(
      f'sft.data={config.sft.data}: no episode of {len(kept.source)} was '
      'successful; use sft.only_successful=False to imitate all'
    )
  _check_tokens(config, text, kept, steps)
  return steps


def pair_rows(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  kept: 'episodes.EpisodeDataset',
) -> preference.PairRows:
  """Returns pairs of continuations in recorded episodes as rows.

  Raises:
    ValueError: in one line, if there is no pair, the tokens are from another
      tokenizer, a step exceeds the token limits, or rewards are not finite.
  """
  turns, team = config.sft.segment_turns, config.reward.agents == 'team'
  try:
    pairs = preference.make_pairs(kept, turns, team=team)
  except ValueError as error:
    raise ValueError(f'sft.data={config.sft.data}: {error}') from error
  if not pairs:
    raise ValueError(
      f'sft.data={config.sft.data}: no two of {len(kept.source)} episodes '
      'differ in reward and response after the same state; must be several '
      'episodes of each task'
    )
  steps = [step for pair in pairs for step in (*pair.better, *pair.worse)]
  _check_tokens(config, text, kept, steps)
  rows = pack_steps(config, steps)
  return preference.PairRows.of(pairs, rows, config.sft.beta)


def _check_tokens(
  config: ml_collections.ConfigDict,
  text: tokenizer.Tokenizer,
  kept: 'episodes.EpisodeDataset',
  steps: list[dict[str, Any]],
) -> None:
  """Raises ValueError if steps of recorded episodes cannot be used."""
  if kept.fingerprint != text.fingerprint:
    raise ValueError(
      f'sft.data={config.sft.data}: made with another tokenizer ('
      f'{kept.fingerprint}) than that of model.path={config.model.path} ('
      f'{text.fingerprint}); must be the same, because the sampled tokens are '
      'used unchanged'
    )
  vocabulary = text.vocab_size
  for name in ('prompt', 'completion'):
    limit = config.rollout[f'max_{name}_tokens']
    longest = max(len(step[f'{name}_ids']) for step in steps)
    if longest > limit:
      raise ValueError(
        f'rollout.max_{name}_tokens={limit}: a step of {config.sft.data} has '
        f'{longest} tokens; must be at least that'
      )
    # Files of others may hold anything; the embedding would clip these.
    ids = [step[f'{name}_ids'] for step in steps]
    flat = np.concatenate(ids)
    if not all(map(len, ids)) or not 0 <= flat.min() <= flat.max() < vocabulary:
      raise ValueError(
        f'sft.data={config.sft.data}: a step has no {name} tokens, or one '
        f'outside the vocabulary of {vocabulary} tokens; must be episodes that '
        'launch/train.py wrote'
      )


def pack_steps(
  config: ml_collections.ConfigDict, steps: list[dict[str, Any]]
) -> batch.Rows:
  """Returns the records of steps as rows of the sampled tokens."""
  names = ('prompt_ids', 'completion_ids')
  columns = ([step[name] for step in steps] for name in names)
  return _pack_rows(config, *columns)


def open_episodes(
  config: ml_collections.ConfigDict,
) -> 'episodes.EpisodeDataset':
  """Returns the recorded episodes of `sft.data`.

  Raises:
    ValueError: in one line, if they cannot be read.
  """
  # tensorflow_datasets is slow to import and only needed here.
  from gigpo_jax import episodes

  if config.sft.init:
    raise ValueError(
      f'sft.init={config.sft.init}: a new tokenizer cannot read the tokens of '
      "sft.data; must be '' (--config.sft.init=)"
    )
  try:
    return episodes.open_dataset(config.sft.data)
  except ValueError as error:
    raise ValueError(f'sft.data={error}') from error


def _pack_rows(
  config: ml_collections.ConfigDict,
  prompts: list[np.ndarray],
  responses: list[np.ndarray],
) -> batch.Rows:
  """Returns prompts and responses as rows, each its own episode."""
  if not _completion_only(config):
    responses = [
      np.concatenate([prompt[1:], response])
      for prompt, response in zip(prompts, responses, strict=True)
    ]
    prompts = [prompt[:1] for prompt in prompts]
  max_prompt, max_completion = _widths(config)
  return batch.pack(
    prompts,
    responses,
    max_prompt_tokens=max_prompt,
    max_completion_tokens=max_completion,
    row_multiple=config.sft.minibatch_rows,
  )


def _completion_only(config: ml_collections.ConfigDict) -> bool:
  """Returns whether rows train on responses only, as all recorded ones do."""
  return config.sft.completion_only or bool(config.sft.data)


def _widths(config: ml_collections.ConfigDict) -> tuple[int, int]:
  """Returns the maximum numbers of prompt and of trained tokens in a row."""
  prompt = config.rollout.max_prompt_tokens
  completion = config.rollout.max_completion_tokens
  if _completion_only(config):
    return prompt, completion
  return 1, prompt + completion - 1


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
  )
  params = parameters.init(model, jax.random.key(config.seed))
  huggingface.save(directory, model, params, dtype='float32')


def _fit(
  config: ml_collections.ConfigDict,
  bundle: model_builders.ModelBundle,
  rows: batch.Rows,
  pairs: preference.PairRows | None,
  workdir: str,
) -> dict:
  """Trains on rows, or on pairs of them; returns all parameters."""
  if pairs:
    most_rows = config.sft.minibatch_rows
    chunks = [*pairs.updates(config.sft.epochs, most_rows, config.seed)]
    updates, loss = len(chunks), preference.FirstOrder()
  else:
    chunks = list(_report_chunks(config, rows))
    size, loss = config.sft.minibatch_rows, losses.Supervised()
    updates = sum(-(-len(row_ids) // size) for _, row_ids in chunks)
  warmup = config.sft.warmup_updates
  if warmup > updates:
    console.log(
      f'sft.warmup_updates={warmup}: more than the {updates} updates, so that '
      'the learning rate does not reach sft.learning_rate'
    )
  _set_learner_options(config, updates)
  bundle = remat.resolve(config, bundle)
  learner = builders.make_learner(config, bundle, loss)
  state = learner.init(bundle.load())
  if pairs:
    reference = learner.log_probs(state.params, rows)
    pairs = dataclasses.replace(pairs, ref_log_probs=reference)
  skipped = 0.0
  with contextlib.closing(builders.make_writer(config, workdir)) as writer:
    for chunk_index, (epoch, row_ids) in enumerate(
      console.progress_bar(chunks, desc='imitation')
    ):
      chunk = rows.take(row_ids)
      columns, own_metrics = {}, {}
      if pairs:
        columns, own_metrics = pairs.columns(
          row_ids, learner.log_probs(state.params, chunk)
        )
      state, metrics = learner.update(
        state, chunk, iteration=chunk_index, skipped_before=skipped, **columns
      )
      skipped = metrics['update/skipped_in_row']
      metrics |= own_metrics | {'update/epoch': float(epoch)}
      writer.write(chunk_index, metrics)
      console.log(
        f'chunk {chunk_index + 1} of {len(chunks)}: '
        f'loss {metrics["loss/total"]:.4f}'
      )
      limit = config.learner.max_skipped_in_row
      if problem := update_sums.skipped_problem(metrics, limit):
        rate = config.sft.learning_rate
        raise errors.RunError(
          f'{problem}; try a lower sft.learning_rate={rate:g}'
        )
  return lora.combine(learner.base, state.params)


def _set_learner_options(
  config: ml_collections.ConfigDict, updates: int
) -> None:
  """Replaces options of RL by those of the warm start, in place."""
  with config.unlocked():
    config.optimizer.update(
      learning_rate=config.sft.learning_rate,
      warmup_updates=config.sft.warmup_updates,
      warmup_ratio=0.0,
      decay_updates=updates if config.sft.decay else 0,
      decay='linear',
      final_rate=0.0,
    )
    config.learner.minibatch_rows = config.sft.minibatch_rows
    config.learner.epochs = 1
    # Demonstrations are no samples at a temperature.
    config.rollout.temperature = 1.0
    if config.sft.loss == 'dpo':
      config.loss.aggregation = 'token_mean'  # See `preference.PairRows`.
    widths = _widths(config)
    config.rollout.max_prompt_tokens = widths[0]
    config.rollout.max_completion_tokens = widths[1]


def _report_chunks(
  config: ml_collections.ConfigDict, rows: batch.Rows
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (epoch, row ids) of the rows between two lines of metrics."""
  real = np.flatnonzero(rows.real)
  for epoch in range(config.sft.epochs):
    order = np.random.default_rng((epoch, config.seed)).permutation(real)
    for start in range(0, len(order), config.sft.report_rows):
      yield epoch, order[start : start + config.sft.report_rows]
