"""The ALFWorld environment: prompts in, responses out, reward 10 or 0.

Combines an engine (`native` or `textworld`), a set of games, the prompt and the
parser of responses. The simulator and games are loaded on first use; no jax is
imported.
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from envs import base, checks, narrator
from envs.alfworld import expert, games, pddl, prompts, world

ENGINES = ('textworld', 'native')
ANCHORS = ('observation', 'observation_and_actions', 'state')
# Start of the feedback to an action that changes nothing.
_NO_EFFECT = 'Nothing happens'
# Starts of feedback to actions whose effect later observations do not show.
_HIDDEN_EFFECTS = ('You heat', 'You cool', 'You clean', 'You turn on')
DATA = base.Data('ALFWORLD_DATA', 'no ALFWorld games; run `alfworld-download`')
PRESETS = {'sampo': {'algorithm.anchor': 'observation_and_actions'}}
CONTEXTS = narrator.CONTEXTS
SUCCESS_REWARD = 10.0


def check_options(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each wrong option."""
  yield from checks.one_of(kwargs, engine=ENGINES, expert_order=expert.ORDERS)
  known = [*inspect.signature(games.open_split).parameters]
  known = [name for name in known if name not in ('split', 'data_dir')]
  for name in kwargs.get('generator') or ():
    if name not in known:
      yield f'env.generator.{name}: unknown; must be one of {", ".join(known)}'


def check_installation(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields missing requirements of the reference engine."""
  if kwargs.get('engine') != 'textworld':
    return
  if sys.version_info >= (3, 13):
    yield (
      'env.engine=textworld: TextWorld does not support Python 3.13 and newer; '
      'use Python 3.11 or 3.12, or env.engine=native'
    )
  elif importlib.util.find_spec('alfworld') is None:
    yield (
      'env.engine=textworld: alfworld is not installed; run '
      "pip install -e '.[alfworld]', or use env.engine=native"
    )


def _make_engine(name: str, spelling: str, *, trust_games: bool = False):
  if name == 'native':
    from envs.alfworld import native

    return native.NativeEngine(spelling=spelling)
  if name == 'textworld':
    from envs.alfworld import textworld

    return textworld.TextWorldEngine(trust_games=trust_games)
  raise ValueError(
    f'env.engine={name}: unknown engine; known: {", ".join(ENGINES)}'
  )


def tasks(split: str, **kwargs) -> games.GameSet:
  """Returns the games of a split; takes the keyword arguments of `Env`."""
  return games.open_split(
    split,
    data_dir=kwargs.get('data_dir') or None,
    **(kwargs.get('generator') or {}),
  )


class Env:
  """Plays one game at a time.

  Args:
    engine: 'native', our engine, or 'textworld', the reference, which gives the
      same texts about 300 times more slowly.
    trust_games: whether engine 'textworld' may run Python code in the grammar
      of a game file; see `textworld`.
    data_dir: folder of `alfworld-download`; None or '' generates games.
    generator: options of `houses.generate` for generated games.
    max_steps: maximum number of turns of an episode.
    history_length: K, the number of past turns in the prompt.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a valid response needs a `<think>` part.
    context: one of `narrator.CONTEXTS`.
    require_admissible: whether an inadmissible action is invalid.
    anchor: one of ANCHORS; identifies a state (GiGPO, Eq. 6). 'state' is the
      observation after the last action with an effect, with the admissible
      actions. It includes the observation before if that tells of an effect
      that later ones do not show: heating, cooling, cleaning, turning on. These
      are the anchors of G2PO's released code (arXiv:2606.22995).
    expert_order: order in which the expert of `demonstrate` searches; one of
      `expert.ORDERS`.

  Raises:
    ValueError: in one line, if an argument is invalid.
  """

  def __init__(
    self,
    *,
    engine: str = 'native',
    trust_games: bool = False,
    data_dir: str | None = None,
    generator: dict | None = None,
    max_steps: int = 50,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
    context: str = 'history',
    require_admissible: bool = False,
    anchor: str = 'observation',
    expert_order: str = 'random',
  ):
    if anchor not in ANCHORS:
      raise ValueError(f'anchor={anchor}: must be one of {", ".join(ANCHORS)}')
    if expert_order not in expert.ORDERS:
      raise ValueError(
        f'env.expert_order={expert_order}: must be one of '
        f'{", ".join(expert.ORDERS)}'
      )
    self._engine_name = engine
    self._engine = _make_engine(engine, 'move', trust_games=trust_games)
    self._spelling = 'move'
    self._game_options = {'data_dir': data_dir, 'generator': generator}
    self._splits: dict[str, games.GameSet] = {}
    self._max_steps = max_steps
    self._transcript = narrator.Transcript(
      prompts.build,
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      context=context,
      unparsed_characters=prompts.UNPARSED_CHARACTERS,
    )
    self._require_admissible = require_admissible
    self._anchor = anchor
    self._expert_order = expert_order
    self._state: world.State
    self._effects: list[str] = []  # The last two texts with an effect.
    self._task = ''

  def game(self, task: base.Task) -> world.World:
    """Returns the game of a task."""
    return self._split(task).world(task.index)

  def _split(self, task: base.Task) -> games.GameSet:
    if task.split not in self._splits:
      self._splits[task.split] = tasks(task.split, **self._game_options)
    return self._splits[task.split]

  def _engine_input(self, task: base.Task) -> world.World | str:
    """Returns the input of the engine: TextWorld reads game files itself."""
    path = self._split(task).path(task.index)
    if path is not None and self._engine_name == 'textworld':
      return path
    return self.game(task)

  def _use_spelling(self, task: base.Task) -> None:
    """Makes the native engine write the commands of a game's release.

    Older releases of ALFWorld write `put X in/on Y`, newer ones `move X to Y`.
    """
    path = self._split(task).path(task.index)
    if path is None or self._engine_name == 'textworld':
      return
    spelling = pddl.spelling(pddl.load_game(path))
    if spelling != self._spelling:
      self._engine = _make_engine(self._engine_name, spelling)
      self._spelling = spelling

  def prepare(self, task: base.Task) -> None:
    """Loads the game into the engine's cache."""
    self._engine.prepare(self._engine_input(task))

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode and returns its first observation."""
    self._use_spelling(task)
    self._engine.load(self._engine_input(task))
    self._effects = []
    self._set_state(self._engine.reset())
    observation, self._task = prompts.split_task(self._state.feedback)
    self._transcript.reset(self._task)
    return self._observe(observation)

  def step(self, response: str) -> base.StepResult:
    """Parses the response, plays its action and returns the result."""
    action, valid = self._transcript.parse(response)
    admissible = action in self._state.admissible
    if self._require_admissible:
      valid = valid and admissible
    self._transcript.record_action(action)
    self._set_state(self._engine.step(action))
    done = self._state.won or self._transcript.step >= self._max_steps
    observation = self._state.feedback.strip()
    return base.StepResult(
      observation=None if done else self._observe(observation),
      final_anchor=self._anchor_text() if done else None,
      reward=SUCCESS_REWARD if self._state.won else 0.0,
      valid=valid,
      action=action,
      success=self._state.won,
      done=done,
      metrics={'inadmissible_action_rate': float(not admissible)},
    )

  def close(self) -> None:
    """Releases the engine."""
    self._engine.close()

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response) of an expert that errs at some rate.

    Args:
      task: the game to play.
      noise: probability that a step's action is drawn uniformly from the
        admissible actions. The expert continues from the resulting state.
      seed: seed of the search order and of the noise.
    """
    rng = np.random.default_rng([seed, task.index])
    observation: base.Observation | None = self.reset(task)
    explorer = expert.Explorer(self._task, rng, order=self._expert_order)
    while observation is not None:
      choices = [c for c in self._state.admissible if c != 'help']
      thought, command = explorer.act(self._state.feedback, choices)
      if rng.random() < noise:
        command = choices[rng.integers(len(choices))]
      response = self._transcript.format_response(thought, command)
      yield observation, response
      observation = self.step(response).observation

  def _set_state(self, state: world.State) -> None:
    self._state = state
    if not state.feedback.strip().startswith(_NO_EFFECT):
      text = '\n'.join((state.feedback, *state.admissible))
      self._effects = [*self._effects[-1:], text]

  def _anchor_text(self) -> str:
    if self._anchor == 'state':
      hidden = self._effects[0].strip().startswith(_HIDDEN_EFFECTS)
      return '\n'.join(self._effects if hidden else self._effects[-1:])
    if self._anchor == 'observation_and_actions':
      return '\n'.join((self._state.feedback, *self._state.admissible))
    return self._state.feedback

  def _observe(self, text: str) -> base.Observation:
    return self._transcript.observe(
      text,
      anchor=self._anchor_text(),
      actions=prompts.listed(self._state.admissible),
    )
