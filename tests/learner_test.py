import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import scipy.special
from tiny_learner import (
  CONFIG,
  EXPERTS,
  LOSS,
  ROW_LOSS,
  C,
  assert_trees_close,
  make_learner,
  make_rows,
  params,
  sgd,
  start,
  step,
)

from gigpo_jax import losses, optimizer, row_packs, token_batch
from gigpo_jax.models import parameters, qwen


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
    columns = {
      'advantages': jnp.broadcast_to(advantages, mask.shape),
      'old_log_probs': jnp.asarray(rows.sampler_log_probs),
      'ref_log_probs': jnp.asarray(rows.sampler_log_probs) - 0.1 * mask,
      'importance': jnp.ones(mask.shape),
    }
    tokens, _ = token_loss(
      token_batch.PolicyOutputs(log_probs, entropies),
      token_batch.make(mask, jnp.zeros(mask.shape, jnp.int32), columns),
    )
    return jnp.sum(jnp.where(mask, tokens, 0)) / jnp.sum(mask)

  value, gradient = jax.jit(jax.value_and_grad(loss))(params())
  expected = jax.tree.map(lambda p, g: p - g, params(), gradient)
  row_advantages = advantages if of_tokens else advantages[:, 0]
  state, metrics = step(sgd(loss=token_loss), rows, advantages=row_advantages)
  assert_trees_close(state.params, expected, 2e-6)
  assert metrics['loss/total'] == pytest.approx(float(value), abs=2e-6)
  assert metrics['update/grad_norm'] == pytest.approx(
    float(optax.tree.norm(gradient)), rel=1e-5
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
  'packs/padding': 1 - 74 / 128,
  'packs/shared_tokens': 0.0,
}


def test_golden_metrics():
  _, metrics = step(make_learner(minibatch_rows=4), make_rows())
  assert metrics == pytest.approx(GOLDEN, rel=2e-4, abs=1e-6), (
    'the metrics of one update of a tiny model have changed. If the change of '
    f'the loss, model or shuffling is intended, set GOLDEN to {metrics}; '
    'otherwise this is a regression.'
  )


@pytest.mark.parametrize(
  'aggregation',
  [
    pytest.param(name, marks=[pytest.mark.slow] * name.startswith('sequence'))
    for name in losses.AGGREGATIONS
  ],
)
@pytest.mark.parametrize(
  'microbatch_tokens', [16, pytest.param(48, marks=pytest.mark.slow)]
)
def test_microbatch_size_does_not_change_the_update(
  aggregation, microbatch_tokens
):
  rows = make_rows()
  single, single_metrics = step(sgd(aggregation=aggregation), rows)
  many, many_metrics = step(
    sgd(
      aggregation=aggregation,
      microbatch_tokens=microbatch_tokens,
      length_buckets=(8, 16),
    ),
    rows,
  )
  assert_trees_close(single.params, many.params, 1e-6)
  for metrics in (single_metrics, many_metrics):
    metrics.pop('packs/padding')
  assert many_metrics == pytest.approx(single_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
  'shared', [pytest.param(False, marks=pytest.mark.slow), True]
)
@pytest.mark.parametrize(
  'config',
  [
    CONFIG,
    pytest.param(EXPERTS, marks=pytest.mark.slow),
    pytest.param(
      dataclasses.replace(CONFIG, num_layers=1), marks=pytest.mark.slow
    ),
  ],
  ids=['dense', 'experts', 'one layer'],
)
def test_gradients_accumulated_in_place_are_equal(config, shared):
  config = dataclasses.replace(config, tie_embeddings=shared)
  in_place = dataclasses.replace(config, remat='layer')
  assert qwen.adds_in_place(in_place) and not qwen.adds_in_place(config)
  rows, results = make_rows(), []
  for subject in (
    sgd(config=c, microbatch_tokens=32, share_prompts=shared)
    for c in (config, in_place)
  ):
    results.append(step(subject, rows, state=start(subject, config)))
  (expected, expected_metrics), (actual, actual_metrics) = results
  assert_trees_close(expected.params, actual.params, 1e-6)
  assert actual_metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize('share', [False, True])
def test_packed_gradients_equal_those_of_one_row_per_sequence(
  monkeypatch, share
):
  rows = make_rows(24)
  plain = {'length_buckets': (16,), 'microbatch_tokens': 64}
  packed, metrics = step(
    sgd(length_buckets=(24,), microbatch_tokens=48, share_prompts=share), rows
  )
  take = row_packs.Packs.take

  def take_one(self, length, targets):
    first = take(self, self.longest, targets)
    assert len(first) == 1
    return first

  monkeypatch.setattr(row_packs.Packs, 'take', take_one)
  alone, alone_metrics = step(sgd(**plain), rows)
  assert metrics['packs/padding'] < alone_metrics['packs/padding'] - 0.05
  assert_trees_close(packed.params, alone.params, 1e-6)


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
  lowered = make_learner(config=config).lower(['accumulate', 'apply'])
  for name, program in lowered.items():
    memory = program.compile().memory_analysis()
    assert memory.temp_size_in_bytes < size / 2, name


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


def test_nothing_compiles_after_warm_up():
  subject = make_learner.__wrapped__(
    minibatch_rows=5, microbatch_tokens=256, length_buckets=(8, 16)
  )
  state = subject.init(params())
  before = jax.device_get(state.params)
  state = subject.warm_up(state)
  assert_trees_close(state.params, before, 0)
  count = subject.compilations
  assert count == len(subject.lowerings()) > 0
  for iteration in range(4):
    rows = make_rows(3 + 5 * iteration, seed=iteration)
    subject.log_probs(state.params, rows)
    state, _ = step(subject, rows, state=state, iteration=iteration)
  assert subject.compilations == count


def _log_softmax(rows, temperature):
  """Returns hidden states and log-probs of all tokens; nothing is packed."""
  # Padding follows the tokens, which do not attend to it.
  hidden = reference.hidden_states(CONFIG, params(), rows.tokens)
  logits = np.asarray(reference.logits(CONFIG, params(), hidden))
  return np.asarray(hidden), scipy.special.log_softmax(logits / temperature, -1)


def test_log_probs_match_the_model_at_the_temperature():
  rows = make_rows()
  actual = make_learner(temperature=0.7, microbatch_tokens=48).log_probs(
    params(), rows
  )
  assert actual.dtype == np.float32
  np.testing.assert_array_equal(actual[~rows.completion_mask], 0)
  _, tables_RLV = _log_softmax(rows, 0.7)
  for r in range(8):
    first = rows.prompt_lengths[r]
    expected = [
      tables_RLV[r, p - 1, rows.tokens[r, p]]
      for p in range(first, rows.lengths[r])
    ]
    np.testing.assert_allclose(actual[r, : len(expected)], expected, atol=1e-5)


def test_epochs_repeat_the_rows_in_another_order():
  rows = make_rows(13)
  subject = make_learner.__wrapped__(minibatch_rows=4, epochs=2)
  first, second = (subject._minibatches(rows, 3, epoch) for epoch in range(2))
  assert [len(m) for m in first] == [len(m) for m in second]
  assert [m.tolist() for m in first] != [m.tolist() for m in second]
  assert sorted(np.concatenate(second)) == list(range(13))
  other = make_learner.__wrapped__(minibatch_rows=4, epochs=2, seed=1)
  for epoch, order in enumerate((first, second)):
    changed = other._minibatches(rows, 3, epoch)
    assert [m.tolist() for m in changed] != [m.tolist() for m in order]
  once = make_learner.__wrapped__(minibatch_rows=4)
  for one, other in zip(first, once._minibatches(rows, 3, 0), strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_two_epochs_are_two_passes():
  rows = make_rows()
  state, metrics = step(make_learner.__wrapped__(epochs=2), rows)
  assert metrics['update/count'] == 2
  assert metrics['update/tokens'] == 2 * rows.completion_mask.sum()
  expected, _ = step(make_learner(), rows)
  expected, _ = step(make_learner(), rows, state=expected)
  assert_trees_close(state.params, expected.params, 1e-5)


def test_signals_come_from_one_pass():
  names = ('log_probs', 'entropies', 'log_probs@0.8', 'prompt_log_probs')
  names += ('feature_squares', 'feature_squares@0.5')
  rows = make_rows()
  subject = make_learner(signals=names, temperature=0.7)
  outputs = subject.signals(params(), rows)
  assert sorted(outputs) == sorted(names)
  mask = rows.completion_mask
  hidden_RLD, tables_RLV = _log_softmax(rows, 0.7)
  cool_RLV = scipy.special.log_softmax(tables_RLV / 0.8, -1)
  for r in range(8):
    hidden, table, cool = hidden_RLD[r], tables_RLV[r], cool_RLV[r]
    first, last = rows.prompt_lengths[r], rows.lengths[r]
    prompt = [table[p - 1, rows.tokens[r, p]] for p in range(1, first)]
    before = slice(first - 1, last - 1)
    entropies = -np.sum(np.exp(table) * table, axis=-1)[before]
    squares = np.sum(hidden[before] ** 2, axis=-1) / 0.7**2
    expected = {
      'log_probs': [
        table[p - 1, rows.tokens[r, p]] for p in range(first, last)
      ],
      'feature_squares': squares,
      'feature_squares@0.5': squares * 4,
      'prompt_log_probs': prompt,
      'entropies': entropies,
      'log_probs@0.8': [
        cool[p - 1, rows.tokens[r, p]] for p in range(first, last)
      ],
    }
    for name, values in expected.items():
      actual = outputs[name][r]
      np.testing.assert_allclose(
        actual[: len(values)], values, rtol=1e-6, atol=1e-5
      )
      np.testing.assert_array_equal(actual[len(values) :], 0)
  assert not outputs['entropies'][~mask].any()


def test_shuffling_is_a_function_of_seed_and_iteration():
  rows = make_rows(13)
  first, _ = step(make_learner(minibatch_rows=4), rows, iteration=3)
  repeated, _ = step(make_learner(minibatch_rows=4), rows, iteration=3)
  other, _ = step(make_learner(minibatch_rows=4), rows, iteration=4)
  assert_trees_close(first.params, repeated.params, 0)
  # 13 rows in mini-batches of at most 4: 4, 3, 3, 3.
  assert int(first.updates) == 4
  assert not np.array_equal(first.params['embed'], other.params['embed'])


def test_metrics_of_packs_are_those_of_the_update():
  rows, subject = make_rows(), make_learner()
  subject.log_probs(params(), rows)
  _, metrics = step(subject, rows)
  assert metrics['packs/tokens'] == rows.lengths.sum()


def test_supervised_loss_decreases_without_a_reference():
  subject = make_learner(
    loss=losses.Supervised(),
    optimizer=optimizer.AdamW(1e-2, warmup_updates=2).make(),
  )
  state, rows = subject.init(params()), make_rows()
  values = []
  for iteration in range(15):
    state, metrics = subject.update(state, rows, iteration=iteration)
    values.append(metrics['loss/total'])
  # The untrained model has a loss of about ln 32 = 3.47.
  assert values[0] == pytest.approx(np.log(32), abs=0.1)
  assert values[-1] < 0.7 * values[0]


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


def test_rows_of_earlier_policies_do_not_count_as_a_sampler_difference():
  rows, subject = make_rows(), make_learner()
  old = rows.sampler_log_probs.copy()
  old[:2, 0] += [1, 0.25]
  rows.ages[0] = 1
  metrics = subject.sampler_difference(params(), rows, old)
  assert metrics['sampler/log_prob_difference_max'] == pytest.approx(
    0.25, abs=1e-5
  )
  assert metrics['sampler/sequence_ratio_max'] == pytest.approx(
    np.exp(0.25), abs=1e-5
  )
  rows.ages[:] = 1
  assert not subject.sampler_difference(params(), rows, old)


def test_sampler_difference_when_training_on_its_log_probs():
  rows, subject = make_rows(), make_learner()
  exact = subject.log_probs(params(), rows)
  index = np.flatnonzero(rows.real)
  longest = index[np.argsort(-rows.lengths[index], kind='stable')][:8]
  sampled = exact.copy()
  sampled[longest[0], 0] -= 0.25
  rows = dataclasses.replace(rows, sampler_log_probs=sampled)
  metrics = subject.sampler_difference(params(), rows)
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
  for weights, scaled in ((half, advantages), (1.0, advantages / 2)):
    subject = make_learner()
    _, metrics = subject.update(
      subject.init(params()),
      rows,
      iteration=0,
      advantages=scaled,
      old_log_probs=rows.sampler_log_probs,
      ref_log_probs=rows.sampler_log_probs,
      importance=weights,
    )
    all_metrics.append(metrics)
  assert all_metrics[0] == pytest.approx(all_metrics[1], rel=1e-5)


def test_rejected_arguments():
  with pytest.raises(ValueError, match='aggregation=sum: unknown; must be'):
    make_learner(aggregation='sum')
  with pytest.raises(ValueError, match=r'^optimizer=AdamW.*must be .*make'):
    make_learner(optimizer=optimizer.AdamW())
  with pytest.raises(ValueError, match='length_buckets=.8,.: a row has'):
    step(make_learner(length_buckets=(8,)), make_rows())


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'ref_log_probs': None}, 'ref_log_probs=None: missing; the loss reads'),
    ({'values': 1.0}, 'values: unknown column; the loss reads advantages, '),
    (
      {'advantages': np.zeros(3)},
      r'advantages: has shape \(3,\); must be .* per row \(16,\)',
    ),
  ],
)
def test_missing_and_unknown_columns_are_refused(changes, message):
  subject, rows = make_learner(), make_rows()
  columns = dict.fromkeys(subject.columns, 0.0) | changes
  with pytest.raises(ValueError, match=message):
    subject.update(subject.init(params()), rows, iteration=0, **columns)


def test_arguments_of_the_previous_release_give_the_same_update():
  rows = make_rows()
  expected, _ = step(
    sgd(loss=losses.PolicyGradient(kl_weight=0.0)), rows, advantages=ADVANTAGES
  )
  with pytest.warns(DeprecationWarning, match='use losses.PolicyGradient'):
    loss = functools.partial(losses.policy_gradient, kl_weight=0.0)
    subject = sgd.func.__wrapped__(loss=loss, **sgd.keywords)
  with pytest.warns(DeprecationWarning, match='advantages=advantages'):
    state, _ = subject.update(
      subject.init(params()),
      rows,
      ADVANTAGES,
      old_log_probs=rows.sampler_log_probs,
      ref_log_probs=None,
      iteration=0,
    )
  assert_trees_close(state.params, expected.params, 0)


ADVANTAGES = np.linspace(-1, 1, 16, dtype=np.float32)


def reinforce(outputs, tokens):
  """Returns minus the advantage times the log-prob, as a loss for tests."""
  loss = -tokens.advantages * outputs.log_probs
  return loss, {'loss/negative': jnp.where(tokens.mask, loss < 0, 0)}


def metric_of(name, value):
  """Returns a loss with a metric; `value` maps log-probs to its values."""
  return lambda outputs, tokens: (
    -tokens.advantages * outputs.log_probs,
    {name: value(outputs.log_probs)},
  )


WRONG_LOSSES = {
  'no pair': (
    lambda outputs, tokens: outputs.log_probs,
    r'an array of shape \(2, 3\); must return \(loss of each token, dict',
  ),
  'metrics in a list': (
    lambda outputs, tokens: (outputs.log_probs, [1.0]),
    'a tuple of .*, a list.; must return .loss of each token, dict',
  ),
  'one loss': (
    lambda outputs, tokens: (jnp.mean(outputs.log_probs), {}),
    r'a loss, an array of shape \(\), for a mask of shape \(2, 3\); must be',
  ),
  'a loss per row': (
    lambda outputs, tokens: (outputs.log_probs.sum(1, keepdims=True), {}),
    r'a loss, an array of shape \(2, 1\), for a mask',
  ),
  'a text': (metric_of('own/x', lambda x: 'high'), 'own/x, a str, for a mask'),
  'one metric': (metric_of('own/x', jnp.sum), r'own/x, .* shape \(\), for a m'),
  'a number as name': (metric_of(1, abs), 'a metric named 1; must be a text'),
  'iteration': (
    metric_of('iteration', abs),
    'iteration, a metric of the trainer; must have another name, such as own/',
  ),
  'success': (metric_of('train/success_rate', abs), 'train/success_rate, a m'),
  'total': (metric_of('loss/total', abs), 'loss/total, a metric of the train'),
}


@pytest.mark.parametrize('name', WRONG_LOSSES)
def test_a_loss_with_wrong_results_is_refused(name):
  function, message = WRONG_LOSSES[name]
  with pytest.raises(ValueError, match=f'^loss.name: returned {message}') as e:
    make_learner(loss=losses.FunctionLoss(function))
  assert len(str(e.value).splitlines()) == 1


def test_a_loss_of_another_module_trains():
  # At ratio 1 the surrogate has the gradient of the log-prob.
  rows = make_rows()
  log_probs = make_learner().log_probs(params(), rows)
  rows = dataclasses.replace(rows, sampler_log_probs=log_probs)
  surrogate = losses.PolicyGradient(kl_weight=0.0, entropy_weight=0.0)
  expected, _ = step(sgd(loss=surrogate), rows)
  own = losses.make(f'{__name__}:reinforce')
  state, metrics = step(sgd(loss=own), rows)
  assert_trees_close(state.params, expected.params, 1e-6)
  # The advantages of all 8 rows are negative.
  assert metrics['loss/negative'] == 1
  assert metrics['update/count'] == 1


def test_the_loss_of_padding_does_not_count():
  rows = make_rows()

  def of_tokens(padding):
    return losses.FunctionLoss(
      lambda outputs, tokens: (
        jnp.where(tokens.mask, -tokens.advantages * outputs.log_probs, padding),
        {},
      )
    )

  expected, plain = step(sgd(loss=of_tokens(0)), rows)
  actual, metrics = step(sgd(loss=of_tokens(jnp.nan)), rows)
  assert metrics['update/skipped'] == 0
  assert metrics['loss/total'] == plain['loss/total']
  assert_trees_close(actual.params, expected.params, 0)
