"""Training runs of a network that mixes attention with a state."""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import programs
import pytest
import small_runs
from hybrid_test import CONFIG

from configs import alfworld
from gigpo_jax import tokenizer
from gigpo_jax.models import huggingface, parameters, qwen
from gigpo_jax.run import model_check

TOKENIZER = 'configs/warm_starts/alfworld_tiny'


def _save(directory: pathlib.Path) -> qwen.QwenConfig:
  """Writes random weights and a tokenizer."""
  text = tokenizer.Tokenizer(TOKENIZER)
  config = dataclasses.replace(
    CONFIG, vocab_size=text.vocab_size, max_positions=512
  )
  params = parameters.init(config, jax.random.key(0))
  huggingface.save(str(directory), config, params, TOKENIZER, dtype='float32')
  return config


def test_what_a_state_does_not_support_is_refused(tmp_path):
  _save(tmp_path)
  config = alfworld.get_config('smoke')
  config.model.path = str(tmp_path)
  config.learner.share_prompts = True
  check = functools.partial(
    model_check.problems, config, trains=True, fetch=False
  )
  for reuse in ('none', 'prompts'):
    config.rollout.reuse_cache = reuse
    assert not list(check())
  config.rollout.reuse_cache = 'all'
  (problem,) = check()
  assert problem.startswith('rollout.reuse_cache=all: ')
  assert problem.endswith('must be prompts or none')


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_ends_the_same(tmp_path):
  policy, whole, parts = (tmp_path / n for n in ('policy', 'whole', 'parts'))
  config = _save(policy)
  flags = (
    f'--config.model.path={policy}',
    '--config.num_iterations=2',
    '--config.evaluation.every=2',
    '--config.checkpoint.every=1',
    # Requests are always decoded together in the same way.
    '--config.rollout.schedule=lockstep',
    '--config.optimizer.learning_rate=1e-3',
  )
  programs.run(small_runs.small(whole, *flags))
  for moment in (
    'checkpoint:_write_manifest+',
    'learner:Learner.update@1',
  ):
    small_runs.interrupt(moment, small_runs.small(parts, *flags))
  programs.run(small_runs.small(parts, *flags))
  small_runs.assert_same_end(parts, whole)
  # The export is trained, and of the same shape.
  exported = huggingface.read_config(str(whole / 'policy'), dtype='float32')
  assert exported == dataclasses.replace(config, dtype='float32')
  before = small_runs.safetensors.numpy.load_file(policy / 'model.safetensors')
  after = small_runs.read_policy(whole)
  assert before.keys() == after.keys()
  # The export is bfloat16, in which small changes of vectors round away.
  for name, weights in before.items():
    assert weights.ndim == 1 or np.any(weights != after[name]), name
  # The last line is the evaluation after the last update.
  *lines, _ = (whole / 'metrics.jsonl').read_text().splitlines()
  for line in map(json.loads, lines):
    assert line['sampler/log_prob_difference_max'] < 1e-4  # noqa: PLR2004
