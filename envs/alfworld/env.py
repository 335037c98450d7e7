"""ALFWorld as the trainer sees it: prompts in, responses out, reward 10 or 0.

Joins an engine (`native` or `textworld`), a set of games, the prompt and the
projection. Simulator and games are loaded on use; nothing here knows jax.
"""

import collections
from collections.abc import Iterator

import numpy as np

from envs import base, turns
from envs.alfworld import expert, games, pddl, prompts, world

ENGINES = ('textworld', 'native')
ANCHORS = ('observation', 'observation_and_actions')
SUCCESS_REWARD = 10.0


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
  """Returns the games of a split; takes the kwargs of `Env`."""
  return games.open_split(
    split,
    data_dir=kwargs.get('data_dir') or None,
    **(kwargs.get('generator') or {}),
  )


class Env:
  """One household at a time.

  Args:
    engine: 'native', ours, or 'textworld', the reference: the same to the
      byte, and some three hundred times slower.
    trust_games: whether engine 'textworld' may run Python code that the
      grammar of a game file holds; see `textworld`.
    data_dir: folder of `alfworld-download`; None or '' generates games.
    generator: options of `houses.generate`, for generated games.
    max_steps: turns after which an unfinished episode ends.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `prompts.STYLES`.
    require_think: whether a response must hold a `<think>` part.
    require_admissible: whether an inadmissible action counts as invalid.
    anchor: one of ANCHORS; what makes two states the same (GiGPO, Eq. 6).
    expert_order: in which the expert of `demonstrate` looks for things; one of
      `expert.ORDERS`.
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
    self._prompt_style = prompt_style
    self._require_think = require_think
    self._require_admissible = require_admissible
    self._anchor = anchor
    self._expert_order = expert_order
    self._history: collections.deque[turns.Turn] = collections.deque(
      maxlen=history_length
    )
    self._state: world.State
    self._task = ''
    self._shown = ''
    self._step = 0

  def game(self, task: base.Task) -> world.World:
    """Returns the household of a task."""
    return self._split(task).world(task.index)

  def _split(self, task: base.Task) -> games.GameSet:
    if task.split not in self._splits:
      self._splits[task.split] = tasks(task.split, **self._game_options)
    return self._splits[task.split]

  def _source(self, task: base.Task) -> world.World | str:
    """Returns what the engine loads: the reference reads files itself."""
    path = self._split(task).path(task.index)
    if path is None:
      return self.game(task)
    if self._engine_name == 'textworld':
      return path
    # Older releases say `put X in/on Y`, newer ones `move X to Y`.
    spelling = pddl.spelling(pddl.load_game(path))
    if spelling != self._spelling:
      self._engine = _make_engine(self._engine_name, spelling)
      self._spelling = spelling
    return self.game(task)

  def prepare(self, task: base.Task) -> None:
    """Makes the game ready in the engine's cache."""
    self._engine.prepare(self._source(task))

  def reset(self, task: base.Task) -> base.Observation:
    """Starts the game from its initial state."""
    self._engine.load(self._source(task))
    self._state = self._engine.reset()
    self._shown, self._task = prompts.split_task(self._state.feedback)
    self._history.clear()
    self._step = 0
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Parses the response, plays its action, and says what came of it."""
    action, valid = prompts.project(response, require_think=self._require_think)
    admissible = action in self._state.admissible
    if self._require_admissible:
      valid = valid and admissible
    self._history.append(turns.Turn(self._shown, action))
    self._state = self._engine.step(action)
    self._shown = self._state.feedback.strip()
    self._step += 1
    done = self._state.won or self._step >= self._max_steps
    return base.StepResult(
      observation=None if done else self._observe(),
      final_anchor=self._where() if done else None,
      reward=SUCCESS_REWARD if self._state.won else 0.0,
      valid=valid,
      action=action,
      success=self._state.won,
      done=done,
      metrics={'inadmissible_action_rate': float(not admissible)},
    )

  def close(self) -> None:
    """Frees the engine."""
    self._engine.close()

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[str, str]]:
    """Yields (prompt, response) of an expert that errs now and then.

    Args:
      task: the game to play.
      noise: probability that a step's action is a uniformly drawn admissible
        one instead of the expert's. The expert goes on from where it led.
      seed: of the exploration order and of the noise.
    """
    rng = np.random.default_rng([seed, task.index])
    observation: base.Observation | None = self.reset(task)
    explorer = expert.Explorer(self._task, rng, order=self._expert_order)
    while observation is not None:
      choices = [c for c in self._state.admissible if c != 'help']
      thought, command = explorer.act(self._state.feedback, choices)
      if rng.random() < noise:
        command = choices[rng.integers(len(choices))]
      think = f'<think>{thought}</think>' if self._require_think else ''
      response = f'{think}<action>{command}</action>'
      yield observation.prompt, response
      observation = self.step(response).observation

  def _where(self) -> str:
    if self._anchor == 'observation_and_actions':
      return '\n'.join((self._state.feedback, *self._state.admissible))
    return self._state.feedback

  def _observe(self) -> base.Observation:
    def prompt(history: tuple[turns.Turn, ...]) -> str:
      return prompts.build(
        task=self._task,
        observation=self._shown,
        admissible=self._state.admissible,
        history=history,
        step=self._step,
        style=self._prompt_style,
        require_think=self._require_think,
      )

    return base.Observation(
      prompt=prompt(tuple(self._history)),
      short_prompt=prompt(()),
      anchor=self._where(),
      text=self._shown,
      task=self._task,
      actions=prompts.listed(self._state.admissible),
    )
