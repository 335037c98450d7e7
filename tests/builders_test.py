"""Tests of the parts of an experiment."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from configs import alfworld, base
from gigpo_jax import builders, sampler
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import published
from gigpo_jax.run import model_builders
from gigpo_jax.runtime import errors


def test_out_of_memory_error_names_field_and_remedy():
  full = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 9 GiB\nwanted')
  with (
    pytest.raises(ValueError, match='lower it, or use more') as error,
    errors.explain_out_of_memory('rollout.batch_buckets', 'lower it'),
  ):
    raise full
  assert str(error.value).startswith('rollout.batch_buckets: the device has')
  assert len(str(error.value).splitlines()) == 1


def test_evaluation_has_its_own_sampling_options():
  config = base.get_config()
  for name, value in {'top_k': 5, 'top_p': 0.9, 'min_p': 0.1}.items():
    config.rollout[name] = value
  train, evaluation = (
    model_builders.make_sampling(config, evaluation=x) for x in (False, True)
  )
  assert train == sampler.Sampling(1.0, top_k=5, top_p=0.9, min_p=0.1)
  assert evaluation == sampler.Sampling(0.4)
  for name, value in {'top_k': 2, 'top_p': 0.8, 'min_p': 0.2}.items():
    config.evaluation[name] = value
  assert model_builders.make_sampling(config) == train
  assert model_builders.make_sampling(
    config, evaluation=True
  ) == sampler.Sampling(0.4, top_k=2, top_p=0.8, min_p=0.2)


@pytest.mark.parametrize('stops', [False, True])
def test_responses_may_stop_at_the_end_of_an_action(stops):
  config = alfworld.get_config('tiny')
  config.rollout.stop_at_action = stops
  bundle = model_builders.make_model_bundle(config)
  find = bundle.sampler._find_stop
  assert (find is not None) == stops
  (ids,) = bundle.tokenizer.encode(['<action>look</action>.'])
  assert not stops or 0 < find(ids, len(ids)) < len(ids)


def test_the_pool_has_environments_for_evaluations_inside_rollouts():
  config = base.get_config()
  config.env.name = 'toy'
  config.pool.num_workers = 0
  config.rollout.groups = config.rollout.episodes_per_group = 2
  config.evaluation.split, config.evaluation.num_tasks = 'valid', 3

  def num_envs() -> int:
    with builders.make_pool(config) as pool:
      return pool.num_envs

  assert num_envs() == 4
  config.evaluation.inside_rollout = True
  assert num_envs() == 4 + 3
  config.evaluation.every = 0
  assert num_envs() == 4
  config.pool.num_envs = 6
  assert num_envs() == 6


def test_other_runtime_errors_are_not_changed():
  other = jax.errors.JaxRuntimeError('INTERNAL: broken')
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match='broken'),
    errors.explain_out_of_memory('rollout.batch_buckets', 'lower it'),
  ):
    raise other


@pytest.mark.parametrize(
  ('dtype', 'option', 'expected'),
  [
    ('bfloat16', 'auto', 'blockwise'),
    ('float32', 'auto', 'blockwise'),
    ('float32', 'xla', 'xla'),
  ],
)
def test_attention_on_a_cpu_skips_blocks(dtype, option, expected):
  config = alfworld.get_config('smoke')
  config.model.dtype, config.model.attention = dtype, option
  mesh = mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  shape = published.SHAPES['Qwen2.5-1.5B']
  model = model_builders.configure_model(shape, config, mesh)
  assert model.attention == expected
  assert model.decode_attention == 'xla'


@pytest.mark.parametrize('field', ['attention', 'decode_attention'])
def test_kernels_of_another_platform_are_refused(field):
  config = alfworld.get_config('smoke')
  kernel = {'attention': 'splash', 'decode_attention': 'paged'}[field]
  config.model[field] = kernel
  mesh = mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  message = f'model.{field}={kernel}: is for tpus, not for cpus'
  with pytest.raises(ValueError, match=message):
    model_builders.configure_model(
      published.SHAPES['Qwen2.5-1.5B'], config, mesh
    )


@pytest.mark.parametrize(
  ('capability', 'head', 'attention', 'decode_attention'),
  [
    ('9.0', 128, 'cudnn', 'triton'),
    ('9.0', 256, 'cudnn', 'triton'),
    ('8.0', 128, 'cudnn', 'triton'),
    ('8.0', 256, 'xla', 'triton'),
    ('7.5', 128, 'xla', 'xla'),
    ('gfx942', 128, 'xla', 'xla'),
  ],
)
def test_gpus_use_the_kernels_that_they_have(
  capability, head, attention, decode_attention
):
  device = types.SimpleNamespace(platform='gpu', compute_capability=capability)
  mesh = types.SimpleNamespace(devices=np.array([device]))
  config = alfworld.get_config('1.5b')
  shape = published.SHAPES['Qwen2.5-1.5B']
  shape = dataclasses.replace(shape, head_dim=head)
  model = model_builders.configure_model(shape, config, mesh)
  assert model.dtype == 'bfloat16'
  assert model.attention == attention
  assert model.decode_attention == decode_attention
