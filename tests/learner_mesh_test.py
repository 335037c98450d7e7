"""Tests that meshes, packs and shared prompts do not change an update."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_learner import (
  CONFIG,
  EXPERTS,
  LOSS,
  ROW_LOSS,
  C,
  assert_trees_close,
  make_learner,
  make_mesh,
  make_rows,
  sgd,
  start,
  step,
)

from gigpo_jax import batch

RECOMPUTED = dataclasses.replace(CONFIG, remat='layer')


@pytest.mark.parametrize(
  ('config', 'axes'),
  [
    pytest.param(CONFIG, {'data': 8}, marks=pytest.mark.slow),
    pytest.param(CONFIG, {'data': 2, 'fsdp': 4}, marks=pytest.mark.slow),
    pytest.param(
      CONFIG, {'data': 2, 'fsdp': 2, 'tensor': 2}, marks=pytest.mark.slow
    ),
    (CONFIG, {'fsdp': 2, 'sequence': 2, 'tensor': 2}),
    pytest.param(
      RECOMPUTED,
      {'data': 2, 'fsdp': 2, 'tensor': 2},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      EXPERTS,
      {'data': 2, 'fsdp': 2, 'tensor': 2},
      marks=pytest.mark.slow,
    ),
    pytest.param(EXPERTS, {'fsdp': 2, 'expert': 4}, marks=pytest.mark.slow),
    pytest.param(
      EXPERTS,
      {'fsdp': 2, 'expert': 2, 'sequence': 2},
      marks=pytest.mark.slow,
    ),
  ],
  ids=lambda x: str(x) if isinstance(x, dict) else f'{x.num_experts}{x.remat}',
)
def test_mesh_does_not_change_the_update(config, axes):
  rows = make_rows()
  one_device = sgd(config=config)
  single, single_metrics = step(
    one_device, rows, state=start(one_device, config)
  )
  subject = sgd(devices=make_mesh(**axes), config=config)
  many, many_metrics = step(subject, rows, state=start(subject, config))
  assert_trees_close(
    jax.device_get(single.params), jax.device_get(many.params), 1e-6
  )
  assert many_metrics == pytest.approx(single_metrics, rel=1e-4, abs=1e-6)
  np.testing.assert_allclose(
    subject.log_probs(many.params, rows),
    one_device.log_probs(single.params, rows),
    atol=1e-5,
  )


def rows_of_few_prompts(*, prompts=3, count=16):
  """Returns rows that share a few prompts."""
  rows = make_rows(count)
  firsts = np.arange(count) % prompts
  tokens = np.zeros_like(rows.tokens)
  completions = rows.lengths - rows.prompt_lengths
  lengths = rows.prompt_lengths[firsts]
  for r, first in enumerate(firsts):
    end = lengths[r] + completions[r]
    tokens[r, : lengths[r]] = rows.tokens[first, : lengths[r]]
    tokens[r, lengths[r] : end] = rows.tokens[
      r, rows.prompt_lengths[r] : rows.lengths[r]
    ]
  return dataclasses.replace(
    rows,
    tokens=tokens,
    prompt_lengths=lengths,
    lengths=lengths + completions,
  )


@pytest.mark.parametrize(
  'devices', [None, pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_shared_prompts_give_the_same_update_with_fewer_tokens(devices):
  rows = rows_of_few_prompts()
  devices = devices and make_mesh(*devices)
  expected, plain = step(sgd(), rows)
  # A pack holds 32 tokens; the longest prompt has five rows.
  subject = sgd(share_prompts=True, devices=devices, length_buckets=(16, 32))
  actual, metrics = step(subject, rows)
  assert_trees_close(
    jax.device_get(actual.params), jax.device_get(expected.params), 1e-6
  )
  saved = metrics.pop('packs/shared_tokens')
  assert metrics['packs/tokens'] + saved == plain['packs/tokens']
  assert saved > 0.2 * plain['packs/tokens']
  for name in plain:
    if not name.startswith('packs/'):
      assert metrics[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6)
  np.testing.assert_allclose(
    subject.log_probs(actual.params, rows),
    sgd().log_probs(expected.params, rows),
    atol=1e-5,
  )


def rows_of_conversations(*, episodes=4, turns=3):
  """Returns rows whose prompts begin with the row before, of two first ones."""
  rng = np.random.default_rng(0)
  prompts, completions = [], []
  for episode in range(episodes):
    text = np.array([3, 1, 4 + episode % 2])
    for _ in range(turns):
      prompts.append(text)
      completions.append(rng.integers(32, size=rng.integers(1, 3)))
      text = np.concatenate([text, completions[-1], rng.integers(32, size=2)])
  rows = batch.pack(
    prompts,
    completions,
    max_prompt_tokens=11,
    max_completion_tokens=C,
    row_multiple=16,
  )
  # Log-probs of a policy that differs from the current one in each turn.
  noise = rng.normal(size=rows.sampler_log_probs.shape)
  old = np.where(rows.completion_mask, -3.4 + 0.3 * noise, 0)
  return dataclasses.replace(
    rows,
    sampler_log_probs=old.astype(np.float32),
    episodes=rows.episodes // turns,
  )


@pytest.mark.parametrize(
  'loss',
  [pytest.param(LOSS, marks=pytest.mark.slow), ROW_LOSS],
  ids=['token', 'row'],
)
def test_a_conversation_gives_the_gradient_of_one_row_per_turn(loss):
  rows = rows_of_conversations()
  expected, plain = step(sgd(loss=loss), rows)
  subject = sgd(loss=loss, share_prompts=True, length_buckets=(16, 32))
  # Every turn has its own advantage, so a mixed-up span changes the gradient.
  actual, metrics = step(subject, rows)
  assert_trees_close(
    jax.device_get(actual.params), jax.device_get(expected.params), 1e-6
  )
  assert metrics['loss/total'] == pytest.approx(plain['loss/total'], abs=1e-6)
  assert metrics['packs/tokens'] < 0.6 * plain['packs/tokens']
  if loss is LOSS:
    np.testing.assert_allclose(
      subject.log_probs(actual.params, rows),
      sgd().log_probs(expected.params, rows),
      atol=1e-5,
    )


@pytest.mark.parametrize(
  'changes',
  [
    {'share_prompts': True, 'length_buckets': (16, 32)},
    {'microbatch_tokens': 48},
    pytest.param(
      {'devices': make_mesh(data=2, fsdp=2)}, marks=pytest.mark.slow
    ),
  ],
  ids=['shared prompts', 'microbatches', 'mesh'],
)
def test_row_ratios_do_not_depend_on_packing(changes):
  rows = rows_of_few_prompts(prompts=4)
  expected, _ = step(sgd(loss=ROW_LOSS), rows)
  actual, _ = step(sgd(loss=ROW_LOSS, **changes), rows)
  assert_trees_close(
    jax.device_get(actual.params), jax.device_get(expected.params), 1e-6
  )


def test_short_sequences_of_many_shards_do_not_change_the_update():
  rows = make_rows(24)
  expected, _ = step(sgd(), rows)
  subject = sgd(
    devices=make_mesh(data=8),
    length_buckets=(1024,),
    microbatch_tokens=8 * 1024,
  )
  actual, metrics = step(subject, rows)
  # All rows fit into sequences of half the length.
  assert metrics['packs/padding'] == 1 - metrics['packs/tokens'] / (8 * 512)
  assert_trees_close(
    jax.device_get(actual.params), jax.device_get(expected.params), 1e-6
  )


def test_rows_of_a_prompt_share_an_update():
  rows = rows_of_few_prompts(prompts=4)
  # 6 rows per mini-batch would split a prompt; instead there are 8, 4 and 4.
  subject = make_learner(share_prompts=True, minibatch_rows=6)
  minibatches = subject._minibatches(rows, 0, 0)
  all_rows = np.sort(np.concatenate(minibatches))
  np.testing.assert_array_equal(all_rows, np.flatnonzero(rows.real))
  prompts = [{r % 4 for r in index} for index in minibatches]
  assert sorted(map(len, prompts)) == [1, 1, 2]
  subject = make_learner(share_prompts=True, minibatch_rows=4)
  for index in subject._minibatches(rows, 0, 0):
    prompts = rows.tokens[index, : rows.prompt_lengths[index].max()]
    assert len(set(rows.prompt_lengths[index])) == 1
    assert (prompts == prompts[0]).all()
