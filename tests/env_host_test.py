"""Tests of a worker's environments."""

import types

import envs
from envs import worker


def test_closing_also_closes_the_environment_of_the_check(monkeypatch):
  closed = []

  def make(name, **kwargs):
    del name, kwargs
    return types.SimpleNamespace(close=lambda: closed.append(1))

  monkeypatch.setattr(envs, 'make', make)
  host = worker.EnvHost('toy', {})
  host.start()
  host.close()
  host.close()
  assert closed == [1]
