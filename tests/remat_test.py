"""Tests of model.remat=auto."""

import dataclasses

import jax
import pytest
import tiny_learner

from configs import alfworld
from gigpo_jax import mesh as mesh_lib
from gigpo_jax import models
from gigpo_jax.run import model_builders, remat

# Large enough that activations dominate, small enough to compile quickly.
MODEL = dataclasses.replace(
  tiny_learner.CONFIG, num_layers=3, intermediate_size=512
)


def _config(mode='auto'):
  config = alfworld.get_config('smoke')
  config.model.remat = mode
  config.rollout.max_prompt_tokens = 64
  config.loss.kl_weight = 0.1
  return config


def _bundle(**fields) -> model_builders.ModelBundle:
  model = dataclasses.replace(MODEL, **fields)
  mesh = mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  return model_builders.ModelBundle(model, mesh, None, None, None)


@pytest.mark.parametrize(
  ('fitting', 'tried', 'chosen'),
  [
    ({'none', 'matrices'}, ['none'], 'none'),
    ({'matrices'}, ['none', 'matrices'], 'matrices'),
    # The last mode needs no compilation: there is no alternative.
    (set(), ['none', 'matrices'], 'layer'),
  ],
)
def test_the_fastest_mode_that_fits_is_chosen(fitting, tried, chosen):
  calls = []

  def fits(mode):
    calls.append(mode)
    return mode in fitting

  assert remat.fastest(fits) == chosen
  assert calls == tried


@pytest.mark.parametrize(('layers', 'chosen'), [(8, 'none'), (9, 'layer')])
def test_unknown_memory(capsys, layers, chosen):
  bundle = remat.resolve(_config(), _bundle(num_layers=layers, remat='layer'))
  assert bundle.model.remat == chosen
  assert capsys.readouterr().out == f'model.remat=auto: {chosen}\n'


def test_a_given_mode_is_kept(capsys):
  bundle = _bundle(remat='matrices')
  assert remat.resolve(_config('matrices'), bundle) is bundle
  assert not capsys.readouterr().out


@pytest.mark.parametrize(
  ('limit', 'chosen'), [(1000.0, 'none'), (999.0, 'matrices'), (1.0, 'layer')]
)
def test_memory_of_the_update_decides(monkeypatch, limit, chosen):
  needed = {'none': 950.0, 'matrices': 900.0, 'layer': 10.0}
  monkeypatch.setattr(mesh_lib, 'device_bytes', lambda: limit)
  monkeypatch.setattr(
    remat, 'update_bytes', lambda _, bundle, __: needed[bundle.model.remat]
  )
  assert remat.resolve(_config(), _bundle()).model.remat == chosen


@pytest.mark.slow
def test_bytes_of_the_compiled_update():
  config = _config()
  config.loss.kl_weight = 0.0
  needed = {
    mode: remat.update_bytes(config, _bundle(remat=mode))
    for mode in ('none', 'layer')
  }
  assert needed['none'] > 1.2 * needed['layer']
  config.loss.kl_weight = 0.1
  more = remat.update_bytes(config, _bundle(remat='layer'), has_critic=True)
  # A float32 reference, and a critic's parameters and two moments.
  count = models.num_parameters(_bundle().model)
  assert more - needed['layer'] == pytest.approx(16 * count, rel=0.1)
