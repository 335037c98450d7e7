"""Tests of networks that mix attention with a state: sampler and learner."""

import dataclasses

import jax
import numpy as np
import pytest
import reference
import sampler_reuse_test as conversations
import tiny_learner
from learner_mesh_test import rows_of_conversations, rows_of_few_prompts

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import prefix_cache, sampler
from gigpo_jax.models import kv_cache, layer_runs, lora, parameters, qwen_config

DELTA = qwen_config.Delta(2, 4, key_size=4, value_size=4)
CONFIG = dataclasses.replace(
  tiny_learner.CONFIG,
  num_layers=3,
  num_kv_heads=2,
  qkv_bias=False,
  qk_norm=True,
  attention_gate=True,
  centered_norms=True,
  rotary_dim=4,
  delta=DELTA,
  delta_layers=(0, 2),
)

EXPERTS = dataclasses.replace(
  CONFIG, num_experts=4, experts_per_token=2, shared_size=12
)


@pytest.fixture(name='params', scope='module')
def fixture_params():
  params = reference.init(CONFIG, jax.random.key(0))
  return params | {'embed': 12 * params['embed']}


def _sampler(mesh=None, **kwargs) -> sampler.Sampler:
  return conversations._sampler(mesh, config=CONFIG, **kwargs)


@pytest.fixture(name='whole', scope='module')
def fixture_whole() -> sampler.Sampler:
  """Returns a sampler that prefills whole prompts."""
  return _sampler(prefill_chunk=0)


@pytest.fixture(name='prompts', scope='module')
def fixture_prompts() -> sampler.Sampler:
  return _sampler(reuse='prompts')


def _learner_log_probs(
  params: dict, request, ids: np.ndarray, config=CONFIG
) -> np.ndarray:
  tokens = np.zeros((1, 48), np.int32)
  length = len(request.prompt_ids)
  tokens[0, : length + len(ids)] = [*request.prompt_ids, *ids]
  log_probs, _ = reference.completion_log_probs(
    config, params, tokens, np.array([length]), max_completion=6
  )
  return log_probs[0, : len(ids)]


def _assert_learner_log_probs(engine, params, requests, atol, config=CONFIG):
  """Asserts that samples have the log-probs that the learner computes."""
  for prompt, done in zip(
    requests, engine.generate(params, requests), strict=True
  ):
    expected = _learner_log_probs(params, prompt, done.ids, config)
    np.testing.assert_allclose(done.log_probs, expected, atol=atol)


def _assert_same_samples(samples, expected, atol):
  for a, b in zip(samples, expected, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=atol)


def _requests(lengths) -> list[sampler.Request]:
  rng = np.random.default_rng(0)
  return [
    sampler.Request(rng.integers(8, 30, n).astype(np.int32), (0, 1, 2, i, 3))
    for i, n in enumerate(lengths)
  ]


@pytest.mark.parametrize(
  'name', [pytest.param('whole', marks=pytest.mark.slow), 'prompts']
)
def test_the_sampler_reports_the_log_probs_of_the_learner(
  params, request, name
):
  engine = request.getfixturevalue(name)
  # More requests than slots: a slot's state must not survive its request.
  requests = _requests((9, 1, 16, 2, 33, 1, 8))
  _assert_learner_log_probs(engine, params, requests, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('weights', ['model', 'int8'])
def test_the_sampler_has_the_experts_of_the_learner(weights):
  params = reference.init(EXPERTS, jax.random.key(0))
  requests = _requests((9, 5))
  engine = conversations._sampler(config=EXPERTS, weights=weights)
  atol = 1e-5 if weights == 'model' else 0.05
  _assert_learner_log_probs(engine, params, requests, atol, EXPERTS)


def test_members_with_one_prompt_equal_separate_prompts(params, whole):
  (first, *_) = _requests((11,))
  group = [dataclasses.replace(first, stream=(0, 1, 2, n, 3)) for n in range(6)]
  whole.take_stats()
  together = whole.generate(params, group)
  stats = whole.take_stats()
  # Two members wait for a slot; the state of the prompt is still there.
  assert stats.prefill_tokens == 11  # noqa: PLR2004
  alone = [whole.generate(params, [member])[0] for member in group]
  _assert_same_samples(together, alone, 1e-6)
  expected = _learner_log_probs(params, first, alone[0].ids)
  np.testing.assert_allclose(alone[0].log_probs, expected, atol=1e-5)


def test_reuse_across_turns_changes_no_bit(params, prompts):
  expected = conversations._separate_turns(_sampler(), params)
  prompts.take_stats()
  conversations._assert_equal(
    conversations._conversations(prompts, params), expected
  )
  assert prompts.take_stats().reused_tokens > 0


@pytest.mark.slow
def test_a_cache_that_changes_its_size_changes_no_token(params, whole):
  requests = _requests((3, 2, 4, 9, 1, 33, 16, 2, 5, 3, 30, 2))
  engine = _sampler(
    prefill_chunk=0, batch_buckets=(2, 4, 8), prompt_buckets=(4, 16, 40)
  )
  _assert_same_samples(
    engine.generate(params, requests), whole.generate(params, requests), 1e-5
  )


@pytest.mark.slow
def test_parked_conversations_change_no_bit(params, prompts):
  expected = conversations._separate_turns(prompts, params)
  parked = _sampler(reuse='prompts', parked=3)
  for schedule in range(2):
    conversations._assert_equal(
      conversations._conversations(parked, params, 0, schedule), expected
    )


def test_a_state_is_reused_as_a_whole_or_not_at_all():
  cache = prefix_cache.PrefixCache(3, 0, 16, 'prompts', whole=True)
  assert cache.place(np.arange(6)) == (0, 0)  # Holds 5 tokens.
  # The same 5 tokens and more; then only 4 of them.
  assert cache.place(np.arange(9)) == (1, 5)
  assert cache.place(np.array([0, 1, 2, 3, 9, 9])) == (2, 0)
  counts = [(move.start, move.count) for move in cache.take_moves()]
  assert counts == [(0, 5), (5, 3), (0, 5)]


def test_reuse_of_completions_is_refused():
  with pytest.raises(ValueError, match='reuse_cache=all: .* must be prompts'):
    _sampler(reuse='all')


@pytest.mark.parametrize('layers', [(), (0, 1, 2)])
def test_a_network_without_attention_is_refused(layers):
  config = dataclasses.replace(CONFIG, delta_layers=layers)
  with pytest.raises(ValueError, match='no layer has attention; the sampler'):
    conversations._sampler(config=config)


@pytest.mark.slow
def test_int8_weights_and_an_int8_cache_are_close(params):
  requests = _requests((9, 5))
  config = dataclasses.replace(CONFIG, cache='int8')
  engine = conversations._sampler(config=config, weights='int8')
  _assert_learner_log_probs(engine, params, requests, 0.1)


@pytest.mark.slow
def test_a_mesh_does_not_change_samples(params, whole):
  mesh = mesh_lib.make_mesh(1, 2, 2, devices=jax.devices()[:4])
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, parameters.logical_axes(CONFIG))
  )
  requests = _requests((9, 1, 16, 2, 33))
  engine = _sampler(mesh, prefill_chunk=0)
  _assert_same_samples(
    engine.generate(placed, requests), whole.generate(params, requests), 1e-4
  )


def test_bytes_of_a_row_by_hand():
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  # One layer with 2 heads of 8 elements, keys and values of 2 bytes.
  assert kv_cache.token_bytes(config) == 2 * 2 * 8 * 2
  # Two layers, the state twice: 4 value heads of 4 x 4 float32, and a window
  # of 3 tokens with 2 heads of 4 + 4 + 2 * 4 elements of 2 bytes.
  state, window = 4 * 16 * 4, 3 * 2 * 16 * 2
  assert kv_cache.state_bytes(config) == 2 * 2 * (state + window)


def _update(rows, config=CONFIG, mesh=None, **kwargs):
  subject = tiny_learner.sgd(devices=mesh, config=config, **kwargs)
  return tiny_learner.step(
    subject, rows, state=tiny_learner.start(subject, config)
  )


@pytest.fixture(name='single', scope='module')
def fixture_single():
  """Returns the update of rows that are not packed: one in each sequence."""
  rows = tiny_learner.make_rows()
  # 16 tokens of a microbatch hold one sequence of the longest rows.
  state, metrics = _update(rows, microbatch_tokens=16, length_buckets=(16,))
  return rows, jax.device_get(state.params), metrics


@pytest.mark.parametrize('remat', ['none', 'layer'])
@pytest.mark.slow
def test_packed_rows_equal_unpacked_rows(single, remat):
  rows, expected, metrics = single
  config = dataclasses.replace(CONFIG, remat=remat)
  # Sequences of 48 tokens hold several rows, and end in padding.
  state, packed = _update(rows, config, length_buckets=(48,))
  tiny_learner.assert_trees_close(jax.device_get(state.params), expected, 1e-5)
  assert packed['loss/total'] == pytest.approx(metrics['loss/total'], abs=1e-5)
  assert packed['packs/tokens'] == metrics['packs/tokens']


@pytest.mark.parametrize(
  'axes',
  [
    {'data': 2, 'fsdp': 2, 'tensor': 2},
    {'data': 2, 'sequence': 2},
  ],
  ids=str,
)
@pytest.mark.slow
def test_a_mesh_does_not_change_the_update(single, axes):
  rows, expected, _ = single
  state, _ = _update(rows, mesh=tiny_learner.make_mesh(**axes))
  tiny_learner.assert_trees_close(jax.device_get(state.params), expected, 1e-5)


WINDOWS = dataclasses.replace(tiny_learner.CONFIG, window=3, window_layers=(0,))


@pytest.mark.parametrize('config', [CONFIG, WINDOWS], ids=['state', 'window'])
@pytest.mark.slow
def test_a_conversation_is_computed_once(config):
  rows = rows_of_conversations()
  expected, plain = _update(rows, config)
  actual, shared = _update(
    rows, config, share_prompts=True, length_buckets=(16, 32)
  )
  tiny_learner.assert_trees_close(
    jax.device_get(actual.params), jax.device_get(expected.params), 1e-5
  )
  # A row continues the row before, but episodes with one prompt do not branch.
  saved = shared['packs/shared_tokens']
  assert saved == plain['packs/tokens'] - shared['packs/tokens'] > 0


@pytest.mark.slow
def test_members_with_one_prompt_do_not_branch():
  rows = rows_of_few_prompts()
  expected, plain = _update(rows)
  actual, shared = _update(rows, share_prompts=True, length_buckets=(16, 32))
  tiny_learner.assert_trees_close(
    jax.device_get(actual.params), jax.device_get(expected.params), 1e-5
  )
  # Only a completion that continues another one shares its tokens.
  assert 0.9 < shared['packs/tokens'] / plain['packs/tokens'] <= 1


@pytest.mark.slow
def test_experts_on_a_mesh_give_the_same_update():
  rows = tiny_learner.make_rows()
  expected, _ = _update(rows, EXPERTS)
  mesh = tiny_learner.make_mesh(fsdp=2, expert=2, tensor=2)
  actual, _ = _update(rows, EXPERTS, mesh)
  tiny_learner.assert_trees_close(
    jax.device_get(actual.params), jax.device_get(expected.params), 1e-5
  )


def test_layers_of_each_kind_by_hand():
  runs = layer_runs.runs(CONFIG)
  assert [(run.start, run.stop) for run in runs] == [(0, 1), (1, 2), (2, 3)]
  assert [run.config.delta for run in runs] == [DELTA, None, DELTA]
  layers = parameters.shapes(CONFIG)['layers']
  assert layers['delta']['qkvz'] == (2, 16, 2, 4 + 4 + 2 * 4 + 2 * 4)
  assert layers['attention']['q'] == (1, 16, 2, 2 * 8)
  assert layers['norm']['q'] == (1, 8)
  assert layers['norm']['mlp'] == (3, 16)


@pytest.mark.slow
def test_merged_adapters_give_the_same_log_probs(params):
  adapted = dataclasses.replace(CONFIG, adapters=lora.Lora(rank=2, alpha=4.0))
  rng = np.random.default_rng(0)
  trained, _ = lora.split(reference.init(adapted, jax.random.key(1)))
  trained = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), trained)
  assert set(trained['layers']['delta']) == {
    f'{name}{suffix}' for name in ('qkvz', 'o') for suffix in ('_a', '_b')
  }
  requests = _requests((9,))
  merged = lora.merge(adapted.adapters, lora.combine(params, trained))
  engine = conversations._sampler(config=adapted, weights='adapters')
  (done,) = engine.generate(trained, requests, params)
  expected = _learner_log_probs(merged, requests[0], done.ids)
  np.testing.assert_allclose(done.log_probs, expected, atol=1e-4)
