"""Parts of an experiment: what a user reads when the memory is not enough."""

import jax
import pytest

from gigpo_jax import experiment


def test_too_little_memory_names_field_and_remedy():
  full = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 9 GiB\nwanted')
  with (
    pytest.raises(ValueError, match='lower it, or use more') as error,
    experiment.explained('rollout.batch_buckets', 'lower it'),
  ):
    raise full
  assert str(error.value).startswith('rollout.batch_buckets: the device has')
  assert len(str(error.value).splitlines()) == 1


def test_other_errors_stay_what_they_are():
  other = jax.errors.JaxRuntimeError('INTERNAL: broken')
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match='broken'),
    experiment.explained('rollout.batch_buckets', 'lower it'),
  ):
    raise other
