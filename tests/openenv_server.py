"""An OpenEnv server for tests: guess a number, with openenv-core's server.

python tests/openenv_server.py PORT
"""

import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app, interfaces
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
  """Guesses a number from 0 to 7."""

  number: int


class Answer(Observation):
  """What the guess is compared with the number."""

  text: str


class Known(State):
  """The range that the number can be in."""

  low: int = 0
  high: int = 7


class Game(interfaces.Environment):
  """The number is a function of the seed."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, episode_id=None, **kwargs):
    self._number, self._known = (seed or 0) % 8, Known()
    return Answer(text='Guess a number from 0 to 7.', done=False)

  def step(self, action, timeout_s=None, **kwargs):
    self._known.step_count += 1
    if action.number == self._number:
      return Answer(text='Right.', reward=1.0, done=True)
    if action.number < self._number:
      self._known.low = max(self._known.low, action.number + 1)
      return Answer(text='Higher.', reward=0.0, done=False)
    self._known.high = min(self._known.high, action.number - 1)
    return Answer(text='Lower.', reward=0.0, done=False)

  @property
  def state(self):
    return self._known


if __name__ == '__main__':
  app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=8)
  uvicorn.run(app, port=int(sys.argv[1]), log_level='warning')
