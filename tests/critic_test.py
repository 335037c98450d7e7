"""Tests of the critic: values of completion tokens and their regression."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from gigpo_jax import batch, critic, losses, mesh, optimizer, token_batch
from gigpo_jax.models import lora, qwen

C = 4
CONFIG = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=32,
  num_layers=2,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  tie_embeddings=False,
  dtype='float32',
  remat='none',
)


def make_critic(config=CONFIG):
  return critic.Critic(
    config,
    mesh.make_mesh(1, 1, 1, devices=jax.devices()[:1]),
    value_clip=0.5,
    optimizer=optimizer.AdamW(1e-2).make(),
    minibatch_rows=8,
    microbatch_tokens=48,
    length_buckets=(12,),
    max_completion_tokens=C,
  )


@pytest.fixture(name='rows', scope='module')
def fixture_rows():
  rng = np.random.default_rng(0)
  return batch.pack(
    [rng.integers(32, size=rng.integers(2, 8)) for _ in range(6)],
    [rng.integers(32, size=rng.integers(1, C + 1)) for _ in range(6)],
    max_prompt_tokens=8,
    max_completion_tokens=C,
    row_multiple=8,
  )


def train(rows, value_mask, targets, updates=60):
  subject = make_critic()
  state = subject.init(reference.init(CONFIG, jax.random.key(0)))
  initial = values = subject.values(state.params, rows)
  for iteration in range(updates):
    state, metrics = subject.update(
      state,
      rows,
      values=values,
      targets=targets,
      value_mask=value_mask,
      iteration=iteration,
    )
    values = subject.values(state.params, rows)
  return initial, values, metrics


def test_values_start_at_zero_and_approach_their_targets(rows):
  value_mask = rows.completion_mask
  rng = np.random.default_rng(1)
  targets = np.where(value_mask, rng.normal(size=value_mask.shape), 0).astype(
    np.float32
  )
  initial, values, metrics = train(rows, value_mask, targets)
  np.testing.assert_array_equal(initial, 0)
  before, after = (
    np.abs(x - targets)[value_mask].mean() for x in (initial, values)
  )
  assert after < 0.25 * before
  assert set(metrics) == {
    'critic/loss',
    'critic/clipped',
    'critic/grad_norm',
    'critic/skipped',
    'critic/skipped_in_row',
    'critic/most_skipped_in_row',
    'critic/count',
  }
  np.testing.assert_array_equal(values[~value_mask], 0)


def test_values_do_not_depend_on_their_token(rows):
  subject = make_critic()
  params = reference.init(
    dataclasses.replace(CONFIG, value_head=True), jax.random.key(0)
  )
  params['value'] = jax.random.normal(jax.random.key(1), (16,))
  values = subject.values(params, rows)
  changed = dataclasses.replace(rows, tokens=rows.tokens.copy())
  last = rows.lengths - 1
  real = np.flatnonzero(rows.real)
  changed.tokens[real, last[real]] += 1
  changed.tokens[:] %= 32
  # No value of a row depends on the row's last token.
  np.testing.assert_allclose(subject.values(params, changed), values, atol=1e-6)


def test_only_positions_of_the_value_mask_are_trained(rows):
  value_mask = rows.completion_mask
  value_mask[:, 1:] = False
  targets = np.where(value_mask, 1.0, 0.0).astype(np.float32)
  _, values, metrics = train(rows, value_mask, targets, updates=1)
  # A row's only position has the weight of all its tokens; its loss is
  # (0 - 1)^2 / 2.
  assert metrics['critic/loss'] == pytest.approx(
    0.5 * rows.completion_mask.sum(1).sum() / rows.completion_mask.sum()
  )
  assert np.abs(values).max() > 0


def test_the_clipped_share_is_one_of_positions_with_a_target(rows):
  value_mask = rows.completion_mask
  value_mask[:, 1:] = False
  subject = make_critic()
  _, metrics = subject.update(
    subject.init(reference.init(CONFIG, jax.random.key(0))),
    rows,
    # From 0 towards 1 is away from -1, by more than the clip.
    values=np.full(value_mask.shape, -1, np.float32),
    targets=np.ones(value_mask.shape, np.float32),
    value_mask=value_mask,
    iteration=0,
  )
  assert metrics['critic/clipped'] == pytest.approx(1)


def test_without_a_value_mask_all_completion_tokens_are_trained(rows):
  targets = rows.completion_mask.astype(np.float32)
  _, expected, _ = train(rows, rows.completion_mask, targets, updates=1)
  _, values, _ = train(rows, None, targets, updates=1)
  assert np.abs(values).max() > 0
  np.testing.assert_array_equal(values, expected)


def test_regression_by_hand():
  tokens = token_batch.make(
    jnp.array([[True, True, True, False]]),
    jnp.zeros((1, 4), jnp.int32),
    {
      'old_values': jnp.array([[1.0, 0.0, 1.0, 0.0]]),
      'value_targets': jnp.array([[3.0, 1.0, 3.0, 0.0]]),
      'value_weights': jnp.array([[1.0, 2.0, 0.0, 1.0]]),
    },
  )
  outputs = token_batch.ValueOutputs(jnp.array([[2.0, 0.2, 2.0, 5.0]]))
  loss, metrics = losses.ValueRegression(value_clip=0.5)(outputs, tokens)
  # clip(2) = 1.5: max(1, 2.25) / 2; 0.2 inside: 2 * 0.64 / 2; weight 0.
  np.testing.assert_allclose(loss, [[1.125, 0.64, 0, 0]], rtol=1e-6)
  np.testing.assert_array_equal(metrics['value/clipped'], [[1, 0, 0, 0]])


@pytest.mark.slow
def test_with_adapters_only_these_and_the_head_are_trained(rows):
  config = dataclasses.replace(CONFIG, adapters=lora.Lora(rank=2))
  subject = make_critic(config)
  state = subject.init(reference.init(config, jax.random.key(0)))
  before = jax.device_get(state.params)
  assert set(before) == {'layers', 'value'}
  assert set(before['layers']['mlp']) == {
    f'{name}_{suffix}' for name in ('gate', 'up', 'down') for suffix in 'ab'
  }
  mask = rows.completion_mask
  values = subject.values(state.params, rows)
  np.testing.assert_array_equal(values, 0)
  for iteration in range(2):
    state, metrics = subject.update(
      state,
      rows,
      values=values,
      targets=mask.astype(np.float32),
      value_mask=mask,
      iteration=iteration,
    )
    assert metrics['critic/grad_norm'] > 0
  assert subject.values(state.params, rows)[mask].mean() > 0
  changed = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()), before, state.params
  )
  assert min(jax.tree.leaves(changed)) > 0
