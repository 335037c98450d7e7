"""A small OpenEnv server: lamps in a row, which must all be switched off.

    pip install openenv-core
    python -m envs.lamps_server 8000

The button of a lamp switches it. An observation lists the lamps that are on,
and a task is the lamps that are on at the start. The server needs openenv-core;
the demonstrator, for the warm start of a tiny policy, needs nothing.
"""

import argparse
import json
import sys
from typing import Any

import numpy as np

from envs import base, tool_calls

NUM_LAMPS = 5
# Episodes at a time.
_MAX_SESSIONS = 256


def start(seed: int) -> list[bool]:
  """Returns the lamps of a task; at least one is on."""
  number = np.random.default_rng(seed).integers(1, 2**NUM_LAMPS)
  return [bool(number >> n & 1) for n in range(NUM_LAMPS)]


def press(lamps: list[bool], button: int) -> list[bool]:
  """Returns the lamps after a button is pressed, from 1."""
  return [on != (n + 1 == button) for n, on in enumerate(lamps)]


def show(lamps: list[bool]) -> str:
  """Returns the lamps that are on as text, such as `1 4`."""
  return ' '.join(str(n + 1) for n, on in enumerate(lamps) if on) or 'none'


def demonstrate(
  observation: base.Observation, noise: float, rng: np.random.Generator
) -> str:
  """Returns a press of the button of a lamp that is on, or of a random one."""
  buttons = [int(name) for name in json.loads(observation.anchor)['on'].split()]
  if rng.random() < noise:
    buttons = range(1, NUM_LAMPS + 1)
  return tool_calls.write(
    tool_calls.Call('act', {'button': int(rng.choice(buttons))})
  )


def make_app() -> Any:
  """Returns the server as a web application."""
  import pydantic
  from openenv.core import env_server
  from openenv.core.env_server import interfaces, types

  Button = pydantic.create_model(
    'Button',
    __base__=types.Action,
    __doc__='Presses a button.',
    button=(int, pydantic.Field(ge=1, le=NUM_LAMPS)),
  )
  Lamps = pydantic.create_model(
    'Lamps', __base__=types.Observation, on=(str, ...)
  )
  Row = pydantic.create_model('Row', __base__=types.State, on=(str, ''))

  class Game(interfaces.Environment):
    """Episodes of a session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
      self._lamps = start(seed or 0)
      return Lamps(on=show(self._lamps), done=False)

    def step(self, action, timeout_s=None, **kwargs):
      self._lamps = press(self._lamps, action.button)
      off = not any(self._lamps)
      return Lamps(on=show(self._lamps), reward=float(off), done=off)

    @property
    def state(self):
      return Row(on=show(self._lamps))

  return env_server.create_fastapi_app(
    Game, Button, Lamps, max_concurrent_envs=_MAX_SESSIONS
  )


def serve(port: int) -> None:
  """Serves on the loopback address."""
  try:
    import uvicorn

    app = make_app()
  except ImportError as error:
    sys.exit(f'{error.name} is not installed; run pip install openenv-core')
  print(f'the lamps are at http://127.0.0.1:{port}', flush=True)
  uvicorn.run(app, port=port, log_level='warning')


if __name__ == '__main__':
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('port', type=int, help='port to listen on')
  serve(parser.parse_args().port)
