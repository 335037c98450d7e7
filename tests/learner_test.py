import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from gigpo_jax import batch, learner, losses, mesh
from gigpo_jax.models import parameters, qwen

C = 6
CONFIG = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=32,
  num_layers=2,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  dtype='float32',
  remat='none',
)
LOSS = functools.partial(losses.policy_gradient, dual_clip=3.0)


def make_mesh(data=1, fsdp=1, tensor=1, **axes):
  count = data * fsdp * tensor * math.prod(axes.values())
  return mesh.make_mesh(
    data, fsdp, tensor, devices=jax.devices()[:count], **axes
  )


# Cached: most of a test's time is compiling.
@functools.cache
def make_learner(devices=None, loss=LOSS, config=CONFIG, **kwargs):
  defaults = {
    'optimizer': learner.adamw(1e-3),
    'minibatch_rows': 64,
    'microbatch_rows': 8,
    'length_buckets': (8, 16),
    'max_completion_tokens': C,
  }
  return learner.Learner(
    config, devices or make_mesh(), loss=loss, **defaults | kwargs
  )


def params():
  return reference.init(CONFIG, jax.random.key(0))


def make_rows(count=8, *, seed=0, row_multiple=16, longest_prompt=9):
  rng = np.random.default_rng(seed)
  rows = batch.pack(
    [
      rng.integers(32, size=rng.integers(2, longest_prompt))
      for _ in range(count)
    ],
    [rng.integers(32, size=rng.integers(1, C + 1)) for _ in range(count)],
    max_prompt_tokens=10,
    max_completion_tokens=C,
    row_multiple=row_multiple,
  )
  noise = rng.normal(size=rows.sampler_log_probs.shape)
  return dataclasses.replace(
    rows,
    sampler_log_probs=np.where(
      rows.completion_mask, -3.4 + 0.3 * noise, 0
    ).astype(np.float32),
  )


def step(subject, rows, *, state=None, iteration=0, advantages=None, **more):
  """Runs one update with the sampler's log-probs; deterministic."""
  if state is None:
    state = subject.init(params())
  if advantages is None:
    advantages = np.linspace(-1, 1, len(rows.groups), dtype=np.float32)
  return subject.update(
    state,
    rows,
    advantages,
    old_log_probs=rows.sampler_log_probs.copy(),
    ref_log_probs=rows.sampler_log_probs - 0.1 * rows.completion_mask,
    iteration=iteration,
    **more,
  )


def assert_trees_close(a, b, atol):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b
  )


# Adam's first step divides a gradient by its own size, which magnifies rounding
# errors of gradients near 0. Plain SGD shows the gradient itself.
SGD = optax.sgd(1.0)
sgd = functools.partial(make_learner, optimizer=SGD)


ROW_LOSS = functools.partial(LOSS, ratio_level='row')


@pytest.mark.parametrize(
  ('token_loss', 'of_tokens'),
  [(LOSS, False), (ROW_LOSS, False), (LOSS, True)],
  ids=['token', 'row', 'advantages of tokens'],
)
def test_update_matches_the_gradient_of_a_reference_loss(token_loss, of_tokens):
  rows = make_rows()
  advantages = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
  if of_tokens:
    advantages = advantages * np.arange(1, C + 1, dtype=np.float32)
  mask = jnp.asarray(rows.completion_mask)

  def loss(weights):
    log_probs, entropies = reference.completion_log_probs(
      CONFIG,
      weights,
      jnp.asarray(rows.tokens),
      jnp.asarray(np.maximum(rows.prompt_lengths, 1)),
      max_completion=C,
      temperature=1.0,
    )
    tokens, _ = token_loss(
      log_probs,
      entropies,
      jnp.asarray(rows.sampler_log_probs),
      jnp.asarray(rows.sampler_log_probs) - 0.1 * mask,
      jnp.asarray(advantages),
      jnp.ones(mask.shape),
      mask,
      jnp.zeros(mask.shape, jnp.int32),
    )
    return jnp.sum(jnp.where(mask, tokens, 0)) / jnp.sum(mask)

  value, gradient = jax.jit(jax.value_and_grad(loss))(params())
  expected = jax.tree.map(lambda p, g: p - g, params(), gradient)
  row_advantages = advantages if of_tokens else advantages[:, 0]
  state, metrics = step(sgd(loss=token_loss), rows, advantages=row_advantages)
  assert_trees_close(state.params, expected, 2e-6)
  assert metrics['loss/total'] == pytest.approx(float(value), abs=2e-6)
  assert metrics['update/grad_norm'] == pytest.approx(
    float(optax.global_norm(gradient)), rel=1e-5
  )
  assert metrics['update/tokens'] == rows.completion_mask.sum()


GOLDEN = {
  'loss/entropy': 3.4608653,
  'loss/kl': 0.0659192,
  'loss/policy': 0.5453429,
  'loss/total': 0.5425413,
  'ratio/clipped_dual': 0.0,
  'ratio/clipped_high': 0.0,
  'ratio/clipped_low': 17 / 37,
  'ratio/kl': 0.0656529,
  'ratio/max': 1.9552684,
  'ratio/mean': 0.9166515,
  'update/grad_norm': 0.637292,
  'update/skipped': 0.0,
  'update/skipped_in_row': 0.0,
  'update/most_skipped_in_row': 0.0,
  'update/count': 2.0,
  'update/tokens': 37.0,
  'packs/tokens': 74.0,
  'packs/padding': 1 - 74 / 256,
  'packs/shared_tokens': 0.0,
}


def test_golden_metrics():
  _, metrics = step(make_learner(minibatch_rows=4), make_rows())
  assert metrics == pytest.approx(GOLDEN, rel=2e-4, abs=1e-6), (
    'the metrics of one update of a tiny model have changed. If the change of '
    f'the loss, model or shuffling is intended, set GOLDEN to {metrics}; '
    'otherwise this is a regression.'
  )


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
@pytest.mark.parametrize('microbatch_rows', [1, 3])
def test_microbatch_size_does_not_change_the_update(
  aggregation, microbatch_rows
):
  rows = make_rows()
  single, single_metrics = step(sgd(aggregation=aggregation), rows)
  many, many_metrics = step(
    sgd(aggregation=aggregation, microbatch_rows=microbatch_rows), rows
  )
  assert_trees_close(single.params, many.params, 1e-6)
  for metrics in (single_metrics, many_metrics):
    metrics.pop('packs/padding')
  assert many_metrics == pytest.approx(single_metrics, rel=1e-4, abs=1e-6)


RECOMPUTED = dataclasses.replace(CONFIG, remat='layer')
EXPERTS = dataclasses.replace(
  CONFIG,
  num_experts=4,
  experts_per_token=2,
  intermediate_size=8,
  qkv_bias=False,
  qk_norm=True,
)


@pytest.mark.parametrize(
  ('config', 'axes'),
  [
    (CONFIG, {'data': 8}),
    (CONFIG, {'data': 2, 'fsdp': 4}),
    (CONFIG, {'data': 2, 'fsdp': 2, 'tensor': 2}),
    (CONFIG, {'fsdp': 2, 'sequence': 2, 'tensor': 2}),
    (RECOMPUTED, {'data': 2, 'fsdp': 2, 'tensor': 2}),
    (EXPERTS, {'data': 2, 'fsdp': 2, 'tensor': 2}),
    (EXPERTS, {'fsdp': 2, 'expert': 4}),
    (EXPERTS, {'fsdp': 2, 'expert': 2, 'sequence': 2}),
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


@pytest.mark.parametrize('share', [False, True])
@pytest.mark.parametrize(
  'config',
  [
    pytest.param(CONFIG, marks=pytest.mark.slow),
    EXPERTS,
    dataclasses.replace(CONFIG, num_layers=1),
  ],
  ids=['dense', 'experts', 'one layer'],
)
def test_gradients_accumulated_in_place_are_equal(config, share):
  config = dataclasses.replace(config, tie_embeddings=share)
  in_place = dataclasses.replace(config, remat='layer')
  assert qwen.adds_in_place(in_place) and not qwen.adds_in_place(config)
  rows, results = make_rows(), []
  for subject in (
    sgd(config=c, microbatch_rows=2, share_prompts=share)
    for c in (config, in_place)
  ):
    results.append(step(subject, rows, state=start(subject, config)))
  (expected, expected_metrics), (actual, actual_metrics) = results
  assert_trees_close(expected.params, actual.params, 1e-6)
  assert actual_metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


def test_update_holds_one_copy_of_the_gradients():
  config = dataclasses.replace(
    CONFIG,
    hidden_size=128,
    intermediate_size=1024,
    num_layers=12,
    remat='layer',
  )
  size = sum(
    4 * math.prod(shape)
    for shape in jax.tree.leaves(
      parameters.shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )
  )
  lowered = make_learner(config=config).lower()
  for name in ('accumulate', 'apply'):
    memory = lowered[name].compile().memory_analysis()
    assert memory.temp_size_in_bytes < size / 2, name


def start(subject, config):
  return subject.init(reference.init(config, jax.random.key(0)))


def test_padding_rows_do_not_change_the_update():
  advantages = np.linspace(-1, 1, 64, dtype=np.float32)
  a, _ = step(sgd(), make_rows(), advantages=advantages[:16])
  b, _ = step(sgd(), make_rows(row_multiple=64), advantages=advantages[:64])
  assert_trees_close(a.params, b.params, 1e-6)


def test_prompt_and_padding_tokens_carry_no_gradient():
  # Completions of length 0: no token contributes to the loss.
  rows = make_rows()
  empty = dataclasses.replace(rows, prompt_lengths=rows.lengths.copy())
  state, metrics = step(sgd(), empty)
  assert_trees_close(state.params, params(), 0)
  assert metrics['update/tokens'] == 0
  # Tokens past a row's end are ignored.
  garbage = rows.tokens.copy()
  past = np.arange(garbage.shape[1]) >= rows.lengths[:, None]
  garbage[past] = 7
  other, _ = step(sgd(), dataclasses.replace(rows, tokens=garbage))
  plain, _ = step(sgd(), rows)
  assert_trees_close(other.params, plain.params, 0)


def test_non_finite_gradient_is_skipped_and_counted():
  subject = make_learner()
  advantages = np.zeros(16, np.float32)
  advantages[0] = np.nan
  state, metrics = step(subject, make_rows(), advantages=advantages)
  assert metrics['update/skipped'] == 1
  assert int(state.updates) == 0
  assert_trees_close(state.params, params(), 0)
  # The skipped update leaves no trace in the accumulator or the moments.
  state, metrics = step(subject, make_rows(), state=state)
  expected, _ = step(make_learner(), make_rows())
  assert metrics['update/skipped'] == 0
  assert int(state.updates) == 1
  assert_trees_close(state.params, expected.params, 0)


def _infinite_loss(*, log_probs, advantages, mask, **others):
  """Returns an infinite loss with finite gradients for marked tokens."""
  del others
  marked = jnp.broadcast_to(advantages, mask.shape) > 1
  return log_probs + jnp.where(marked, jnp.inf, 0.0), {}


def test_non_finite_loss_with_finite_gradient_is_skipped():
  subject = make_learner(loss=_infinite_loss)
  advantages = np.zeros(16, np.float32)
  advantages[3] = 2
  state, metrics = step(subject, make_rows(), advantages=advantages)
  assert (metrics['update/skipped'], metrics['update/grad_norm']) == (1, 0)
  assert_trees_close(state.params, params(), 0)
  # The next update is unaffected.
  state, metrics = step(
    subject, make_rows(), state=state, advantages=advantages * 0
  )
  assert metrics['update/skipped'] == 0
  assert metrics['update/grad_norm'] > 0


def test_consecutive_skipped_updates_are_counted():
  subject = make_learner(
    loss=_infinite_loss, minibatch_rows=2, microbatch_rows=2
  )
  rows = make_rows()
  order = np.concatenate(subject._minibatches(rows, 0))
  zeros = np.zeros(16, np.float32)
  for positions, before, skipped, in_row, longest in (
    ([0, 1], 0, 1, 0, 1),
    ([0, 7], 0, 2, 1, 1),
    ([0, 2, 4], 0, 3, 0, 3),
    ([0, 2], 3, 2, 0, 5),
    ([0, 4, 6], 0, 3, 2, 2),
    (range(8), 2, 4, 6, 6),
  ):
    advantages = zeros.copy()
    advantages[order[list(positions)]] = 2
    _, metrics = step(
      subject, rows, advantages=advantages, skipped_before=before
    )
    assert metrics['update/count'] == 4
    assert metrics['update/skipped'] == skipped
    assert metrics['update/skipped_in_row'] == in_row
    assert metrics['update/most_skipped_in_row'] == longest


def test_nothing_compiles_after_warm_up():
  subject = make_learner.__wrapped__(minibatch_rows=5, microbatch_rows=4)
  state = subject.init(params())
  before = jax.device_get(state.params)
  advances = []
  state = subject.warm_up(state, advance=lambda: advances.append(1))
  assert len(advances) == subject.num_programs()
  assert_trees_close(state.params, before, 0)
  count = subject.compilations
  assert count > 0
  for iteration in range(4):
    rows = make_rows(3 + 5 * iteration, seed=iteration)
    subject.log_probs(state.params, rows)
    state, _ = step(subject, rows, state=state, iteration=iteration)
  assert subject.compilations == count


def test_log_probs_match_the_model_at_the_temperature():
  rows = make_rows()
  actual = make_learner(temperature=0.7, microbatch_rows=3).log_probs(
    params(), rows
  )
  assert actual.dtype == np.float32
  np.testing.assert_array_equal(actual[~rows.completion_mask], 0)
  for r in range(8):
    tokens = jnp.asarray(rows.tokens[r : r + 1, : rows.lengths[r]])
    hidden = reference.hidden_states(CONFIG, params(), tokens)
    logits = reference.logits(CONFIG, params(), hidden)[0] / 0.7
    table = jax.nn.log_softmax(logits)
    first = rows.prompt_lengths[r]
    expected = [
      table[p - 1, rows.tokens[r, p]] for p in range(first, rows.lengths[r])
    ]
    np.testing.assert_allclose(actual[r, : len(expected)], expected, atol=1e-5)


def test_shuffling_is_a_function_of_seed_and_iteration():
  rows = make_rows(13)
  first, _ = step(make_learner(minibatch_rows=4), rows, iteration=3)
  repeated, _ = step(make_learner(minibatch_rows=4), rows, iteration=3)
  other, _ = step(make_learner(minibatch_rows=4), rows, iteration=4)
  assert_trees_close(first.params, repeated.params, 0)
  # 13 rows in mini-batches of at most 4: 4, 3, 3, 3.
  assert int(first.updates) == 4
  assert not np.array_equal(first.params['embed'], other.params['embed'])


def test_supervised_loss_decreases_without_a_reference():
  subject = make_learner(
    loss=losses.supervised, optimizer=learner.adamw(1e-2, warmup_updates=2)
  )
  state, rows = subject.init(params()), make_rows()
  values = []
  for iteration in range(15):
    state, metrics = subject.update(
      state,
      rows,
      np.zeros(16, np.float32),
      old_log_probs=rows.sampler_log_probs,
      ref_log_probs=None,
      iteration=iteration,
    )
    values.append(metrics['loss/total'])
  # The untrained model has a loss of about ln 32 = 3.47.
  assert values[0] == pytest.approx(np.log(32), abs=0.1)
  assert values[-1] < 0.7 * values[0]


def test_adamw_by_hand():
  # Gradient (3, 4), norm 5, clipped to (.6, .8). Adam's first step is the sign
  # of each, times 0.1; decay subtracts 0.1 * 0.01 * 2 from a weight of 2.
  optimizer = learner.adamw(0.1, weight_decay=0.01)
  weights = jnp.array([2.0, 2.0])
  state = optimizer.init(weights)
  changes, _ = optimizer.update(jnp.array([3.0, 4.0]), state, weights)
  np.testing.assert_allclose(changes, [-0.102, -0.102], rtol=1e-5)
  # First of 4 warm-up updates: a quarter.
  optimizer = learner.adamw(0.1, warmup_updates=4, weight_decay=0.0)
  changes, _ = optimizer.update(weights, optimizer.init(weights), weights)
  np.testing.assert_allclose(changes, [-0.025, -0.025], rtol=1e-5)
  # A gradient of norm 0.5 is not clipped: its mean is a tenth of it.
  optimizer = learner.adamw(0.1, mu_dtype='bfloat16')
  gradient = jnp.array([0.3, 0.4])
  _, state = optimizer.update(gradient, optimizer.init(weights), weights)
  mean = optax.tree_utils.tree_get(state, 'mu')
  assert mean.dtype == jnp.bfloat16
  np.testing.assert_allclose(mean.astype('float32'), gradient / 10, rtol=4e-3)


def test_sampler_difference_by_hand():
  rows, subject = make_rows(), make_learner()
  # One of the 37 tokens is off by 0.37; positions past the end do not count.
  old = rows.sampler_log_probs.copy()
  old[0, 0] += 0.37
  old[~rows.completion_mask] = 5
  metrics = subject.sampler_difference(params(), rows, old)
  count = rows.real.sum()
  assert metrics == pytest.approx(
    {
      'sampler/log_prob_difference_mean': 0.01,
      'sampler/log_prob_difference_max': 0.37,
      'sampler/sequence_ratio_mean': (count - 1 + np.exp(0.37)) / count,
      'sampler/sequence_ratio_max': np.exp(0.37),
    },
    abs=1e-5,
  )


def test_sampler_difference_when_training_on_its_log_probs():
  rows, subject = make_rows(), make_learner()
  exact = subject.log_probs(params(), rows)
  index = np.flatnonzero(rows.real)
  longest = index[np.argsort(-rows.lengths[index], kind='stable')][:8]
  sampled = exact.copy()
  sampled[longest[0], 0] -= 0.25
  rows = dataclasses.replace(rows, sampler_log_probs=sampled)
  metrics = subject.sampler_difference(params(), rows, rows.sampler_log_probs)
  assert metrics['sampler/log_prob_difference_max'] == pytest.approx(
    0.25, abs=1e-5
  )
  assert metrics['sampler/sequence_ratio_max'] == pytest.approx(
    np.exp(0.25), abs=1e-5
  )


def test_importance_scales_the_surrogate():
  rows = make_rows()
  half = np.full(rows.sampler_log_probs.shape, 0.5, np.float32)
  advantages = np.linspace(-1, 1, 16).astype(np.float32)
  all_metrics = []
  for weights, scaled in ((half, advantages), (None, advantages / 2)):
    subject = make_learner()
    _, metrics = subject.update(
      subject.init(params()),
      rows,
      scaled,
      old_log_probs=rows.sampler_log_probs,
      ref_log_probs=rows.sampler_log_probs,
      iteration=0,
      importance=weights,
    )
    all_metrics.append(metrics)
  assert all_metrics[0] == pytest.approx(all_metrics[1], rel=1e-5)


def test_rejected_arguments():
  with pytest.raises(ValueError, match='aggregation=sum: unknown; must be'):
    make_learner(aggregation='sum')
  with pytest.raises(ValueError, match='microbatch_rows=6: .* multiple of 8'):
    make_learner(devices=make_mesh(8), microbatch_rows=6)
  with pytest.raises(ValueError, match='length_buckets=.8,.: a row has'):
    step(make_learner(length_buckets=(8,)), make_rows())
  subject, rows = make_learner(), make_rows()
  with pytest.raises(ValueError, match='ref_log_probs=None'):
    subject.update(
      subject.init(params()),
      rows,
      np.zeros(16, np.float32),
      old_log_probs=rows.sampler_log_probs,
      ref_log_probs=None,
      iteration=0,
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


@pytest.mark.parametrize('devices', [None, (2, 2, 2)], ids=str)
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


def test_row_ratios_do_not_depend_on_packing():
  rows = rows_of_few_prompts(prompts=4)
  expected, _ = step(sgd(loss=ROW_LOSS), rows)
  for changes in (
    {'share_prompts': True, 'length_buckets': (16, 32)},
    {'microbatch_rows': 3},
    {'devices': make_mesh(data=2, fsdp=2)},
  ):
    actual, _ = step(sgd(loss=ROW_LOSS, **changes), rows)
    assert_trees_close(
      jax.device_get(actual.params), jax.device_get(expected.params), 1e-6
    )


def test_rows_of_a_prompt_share_an_update():
  rows = rows_of_few_prompts(prompts=4)
  # 6 rows per mini-batch would split a prompt; instead there are 8, 4 and 4.
  subject = make_learner(share_prompts=True, minibatch_rows=6)
  minibatches = subject._minibatches(rows, 0)
  all_rows = np.sort(np.concatenate(minibatches))
  np.testing.assert_array_equal(all_rows, np.flatnonzero(rows.real))
  prompts = [{r % 4 for r in index} for index in minibatches]
  assert sorted(map(len, prompts)) == [1, 1, 2]
  subject = make_learner(share_prompts=True, minibatch_rows=4)
  for index in subject._minibatches(rows, 0):
    prompts = rows.tokens[index, : rows.prompt_lengths[index].max()]
    assert len(set(rows.prompt_lengths[index])) == 1
    assert (prompts == prompts[0]).all()
