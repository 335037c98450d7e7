"""Tests of adapters: applied, merged, trained and exported."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import preloaded
import pytest
import reference
import small_runs

from gigpo_jax import batch, learner, losses, sampler
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import huggingface, lora, qwen, qwen_config

CONFIG = qwen.QwenConfig(
  vocab_size=48,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  adapters=lora.Lora(rank=3, alpha=6.0),
  dtype='float32',
  remat='none',
)
BASE = dataclasses.replace(CONFIG, adapters=None)


def _params(*, trained: bool, config=CONFIG) -> dict:
  params = reference.init(config, jax.random.key(0))
  if not trained:
    return params
  adapters, base = lora.split(params)
  rng = np.random.default_rng(1)
  adapters = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), adapters
  )
  return lora.combine(base, adapters)


def _logits(config, params, tokens):
  return reference.logits(
    config, params, reference.hidden_states(config, params, tokens)
  )


TOKENS = np.random.default_rng(0).integers(0, 48, (3, 9), np.int32)


def test_new_adapters_do_not_change_the_logits():
  params = _params(trained=False)
  np.testing.assert_array_equal(
    _logits(CONFIG, params, TOKENS),
    _logits(BASE, lora.split(params)[1], TOKENS),
  )


def test_a_joint_matrix_needs_all_of_its_targets():
  assert lora.Lora(4, targets=('q', 'k', 'v')).adapts('qkvz')
  some = lora.Lora(4, targets=('q', 'v'))
  assert some.adapts('q') and not some.adapts('qkvz')


def test_merged_matrix_by_hand():
  # W = 0, so y = (alpha / rank) * b (a x) with 2 / 1, a = (1, 1), b = 3.
  params = {
    'w': jnp.zeros((1, 2, 1)),
    'w_a': jnp.ones((1, 2, 1)),
    'w_b': jnp.full((1, 1, 1), 3.0),
  }
  merged = lora.merge(lora.Lora(rank=1, alpha=2.0), params)
  np.testing.assert_array_equal(merged['w'], [[[6.0], [6.0]]])
  assert set(merged) == {'w'}


def test_merged_adapters_give_the_logits_of_separate_adapters():
  params = _params(trained=True)
  merged = lora.merge(CONFIG.adapters, params)
  assert not lora.split(merged)[0]
  adapted = _logits(CONFIG, params, TOKENS)
  np.testing.assert_allclose(
    _logits(BASE, merged, TOKENS), adapted, atol=1e-5 * np.abs(adapted).max()
  )
  plain = _logits(BASE, lora.split(params)[1], TOKENS)
  assert np.abs(adapted - plain).max() > 0.1 * np.abs(plain).max()


@pytest.mark.parametrize(
  'weights',
  [
    pytest.param('model', marks=pytest.mark.slow),
    'adapters',
    pytest.param('int8', marks=pytest.mark.slow),
  ],
)
def test_the_sampler_applies_adapters(weights):
  params = _params(trained=True)
  options = {
    'seed': 0,
    'prompt_buckets': (8,),
    'batch_buckets': (8,),
    'max_completion_tokens': 6,
    'stop_ids': (),
    'vocab_size': 48,
  }
  mesh = mesh_lib.make_mesh(1, -1, 1)
  request = sampler.Request(TOKENS[0, :5], (0, 0, 0, 0, 0))
  exact = sampler.Sampler(BASE, mesh, **options).generate(
    lora.merge(CONFIG.adapters, params), [request]
  )
  engine = sampler.Sampler(CONFIG, mesh, weights=weights, **options)
  adapters, base = lora.split(params)
  samples = engine.generate(adapters, [request], base)
  if weights == 'int8':  # Rounding may change the sampled tokens.
    assert len(samples[0].ids) == 6
    return
  np.testing.assert_array_equal(samples[0].ids, exact[0].ids)
  np.testing.assert_allclose(
    samples[0].log_probs, exact[0].log_probs, atol=1e-4
  )


def _learner(config=CONFIG, **axes):
  axes = {'data': 1, 'fsdp': 1, 'tensor': 1} | axes
  count = int(np.prod(list(axes.values())))
  return learner.Learner(
    config,
    mesh_lib.make_mesh(**axes, devices=jax.devices()[:count]),
    loss=losses.Supervised(),
    optimizer=optax.sgd(1.0),
    minibatch_rows=8,
    microbatch_tokens=48,
    length_buckets=(12,),
    max_completion_tokens=4,
  )


def _rows():
  return batch.pack(
    list(TOKENS[:, :5]) + list(TOKENS[:, 1:5]),
    list(TOKENS[:, 5:]) + list(TOKENS[:, 5:8]),
    max_prompt_tokens=8,
    max_completion_tokens=4,
    row_multiple=8,
  )


def _update(subject, params):
  rows = _rows()
  return subject.update(
    subject.init(params),
    rows,
    iteration=0,
  )


def test_only_adapters_are_trained():
  subject = _learner()
  adapters, base = lora.split(jax.device_get(_params(trained=True)))
  state, metrics = _update(subject, _params(trained=True))
  assert metrics['update/grad_norm'] > 0
  jax.tree.map(np.testing.assert_array_equal, subject.base, base)
  assert jax.tree.structure(state.params) == jax.tree.structure(adapters)
  changed = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()), state.params, adapters
  )
  assert min(jax.tree.leaves(changed)) > 0


def test_gradients_equal_those_through_the_merged_network():
  params = _params(trained=True)
  adapters, base = lora.split(params)

  def loss(config, params):
    return jnp.sum(jnp.square(_logits(config, params, TOKENS)))

  grads = jax.jit(jax.grad(lambda a: loss(CONFIG, lora.combine(base, a))))(
    adapters
  )

  def merged_loss(a):
    return loss(BASE, lora.merge(CONFIG.adapters, lora.combine(base, a)))

  expected = jax.jit(jax.grad(merged_loss))(adapters)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=1e-4 * np.abs(b).max() + 1e-6
    ),
    grads,
    expected,
  )


def test_the_network_without_adapters_is_the_reference():
  subject, params = _learner(), _params(trained=True)
  state = subject.init(params)
  plain = _learner(BASE)
  expected = plain.log_probs(plain.init(lora.split(params)[1]).params, _rows())
  np.testing.assert_allclose(
    subject.log_probs({}, _rows()), expected, atol=1e-5
  )
  difference = subject.log_probs(state.params, _rows()) - expected
  assert np.abs(difference).max() > 0.1


@pytest.mark.slow
def test_a_mesh_gives_the_update_of_one_device():
  single, _ = _update(_learner(), _params(trained=True))
  sharded, _ = _update(
    _learner(data=2, fsdp=2, tensor=2), _params(trained=True)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    jax.device_get(single.params),
    jax.device_get(sharded.params),
  )


# transformers and peft warn about each other's deprecations.
@pytest.mark.filterwarnings('ignore::FutureWarning')
# peft gives joined experts their rank by parameter, not by module, and warns.
@pytest.mark.filterwarnings('ignore:The following (rank|alpha)_pattern keys')
@pytest.mark.parametrize(
  'family',
  [
    'qwen2',
    pytest.param('qwen3', marks=pytest.mark.slow),
    pytest.param('qwen3_moe', marks=pytest.mark.slow),
    pytest.param('qwen3_next', marks=pytest.mark.slow),
  ],
)
def test_peft_loads_an_export(tmp_path, family):
  torch = pytest.importorskip('torch', reason='parity needs PyTorch')
  peft = pytest.importorskip('peft', reason='parity needs PEFT')
  import transformers

  config = dataclasses.replace(
    CONFIG,
    qkv_bias=family == 'qwen2',
    qk_norm=family != 'qwen2',
    adapters=lora.Lora(3, 6.0, ('q', 'o', 'gate', 'down')),
  )
  if family in ('qwen3_moe', 'qwen3_next'):
    # peft joins gate and up, so both must be adapted.
    config = dataclasses.replace(
      config,
      num_experts=4,
      experts_per_token=2,
      adapters=lora.Lora(3, 6.0, ('q', 'o', 'gate', 'up', 'down')),
      dense_layers=(0,),
      dense_size=40,
    )
  if family == 'qwen3_next':
    config = dataclasses.replace(
      config,
      attention_gate=True,
      centered_norms=True,
      shared_size=24,
      delta=qwen_config.Delta(2, 4, key_size=4, value_size=4, joined=True),
      delta_layers=(0,),
    )
  params = _params(trained=True, config=config)
  adapters, base = lora.split(params)
  plain = dataclasses.replace(config, adapters=None)
  huggingface.save(str(tmp_path / 'base'), plain, base, dtype='float32')
  huggingface.save_adapters(
    str(tmp_path / 'adapters'), config, adapters, str(tmp_path / 'base')
  )
  huggingface.save(str(tmp_path / 'merged'), config, params, dtype='float32')
  expected = np.asarray(_logits(config, params, TOKENS))
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'base', dtype='float32'
  )
  merged = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'merged', dtype='float32'
  )
  adapted = peft.PeftModel.from_pretrained(loaded, tmp_path / 'adapters')
  tokens = torch.tensor(TOKENS, dtype=torch.long)
  for model in (adapted, merged):
    with torch.no_grad():
      logits = model(tokens).logits.numpy()
    np.testing.assert_allclose(
      logits, expected, atol=2e-5 * np.abs(expected).max()
    )


def test_adapters_name_their_base_model(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder = pathlib.Path('runs/first@2')
  folder.mkdir(parents=True)
  adapters, _ = lora.split(_params(trained=True))
  for base, expected in (
    ('Qwen/Qwen3-4B', ('Qwen/Qwen3-4B', None)),
    ('Qwen/Qwen3-4B@abc', ('Qwen/Qwen3-4B', 'abc')),
    (str(folder), (str(folder), None)),
  ):
    huggingface.save_adapters('adapters', CONFIG, adapters, base)
    text = pathlib.Path('adapters/adapter_config.json').read_text()
    stored = json.loads(text)
    assert (stored['base_model_name_or_path'], stored['revision']) == expected


@pytest.mark.slow
def test_a_resumed_run_with_a_critic_equals_a_whole_run(tmp_path):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'

  def run(workdir, *more):
    flags = '--config.lora.rank=2', '--config.evaluation.every=0', *more
    return preloaded.run(small_runs.small(workdir, *flags, variant='smoke,ppo'))

  run(whole)
  run(parts, '--config.num_iterations=2')
  assert 'resuming' in run(parts)
  small_runs.assert_same_end(parts, whole)
