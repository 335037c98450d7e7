"""MiniGrid and BabyAI levels in text: missions in a grid that is partly seen.

The observation lists what the agent sees, relative to its position and
direction: `a red key 2 steps forward and 1 step left`. The actions are
MiniGrid's, in words. A task is the seed that is passed to `reset`.

The state, unlike the observation, is the entire grid with the agent's position
and direction, the object that it carries, and the parts of the mission that are
done.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from envs import base, narrator, seeds

ANCHORS = ('observation', 'state')
SUCCESS_REWARD = 10.0
# MiniGrid's action of each name.
ACTIONS = {
  'turn left': 0,
  'turn right': 1,
  'go forward': 2,
  'pick up': 3,
  'drop': 4,
  'toggle': 5,
}
# BabyAI's levels end without it.
_DONE = {'done': 6}

_ROLE = 'You are an expert agent operating in a grid world.'
_RULES = """\
You see a part of the grid in front of you. Places are given relative to you. \
turn left, turn right: turn by 90 degrees. go forward: walk one step. pick up: \
take the object one step in front of you. drop: put what you carry one step in \
front of you. toggle: open or close the door or the box one step in front of \
you; a locked door needs the key of its colour."""
_DONE_RULE = ' done: say that you are where the mission sends you.'
_DIRECTIONS = ('right', 'down', 'left', 'up')  # by MiniGrid's number
_DOOR_STATES = ('open', 'closed', 'locked')


def check_installation(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line if the level cannot be made."""
  try:
    _make(kwargs.get('id')).close()
  except ValueError as error:
    yield str(error)


class Env:
  """A MiniGrid level as a text environment.

  Args:
    id: registered id, such as 'BabyAI-GoToLocal-v0' or 'MiniGrid-Empty-8x8-v0'.
    anchor: one of ANCHORS; identifies a state (GiGPO, Eq. 6).
    seed: base seed of the tasks.
    max_steps: step limit of an episode; the level's own limit also holds.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must contain a `<think>` part.

  Raises:
    ValueError: in one line, if an argument is not valid.
  """

  def __init__(
    self,
    *,
    id: str | None = None,
    anchor: str = 'observation',
    seed: int = 0,
    max_steps: int = 64,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
  ):
    seeds.check_seed(seed)
    self._level, self._id = _make(id), id
    self._is_baby_ai = hasattr(self._level, 'gen_mission')
    self._actions = ACTIONS if self._is_baby_ai else ACTIONS | _DONE
    self._anchor, self._seed, self._max_steps = anchor, seed, max_steps
    self._narrator = narrator.Narrator(
      _ROLE,
      rules=_RULES + ('' if self._is_baby_ai else _DONE_RULE),
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      brief_observations=True,
    )

  def prepare(self, task: base.Task) -> None:
    """Does nothing; there is nothing to load."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode with the task's seed."""
    seed = seeds.Seeds(task.split, self._seed)[task.index]
    # Levels print why they draw again.
    with contextlib.redirect_stdout(io.StringIO()):
      self._level.reset(seed=seed)
    self._narrator.reset(f'{self._level.mission}.')
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Acts; a response without an action of the list only uses up a step."""
    action, valid = self._narrator.parse(response)
    valid = valid and action in self._actions
    self._narrator.record_action(action)
    reward, ended = 0.0, False
    if valid:
      _, reward, terminated, truncated, _ = self._level.step(
        self._actions[action]
      )
      ended = bool(terminated or truncated)
    success = ended and reward > 0
    done = ended or self._narrator.step >= self._max_steps
    observation = self._observe()
    # `done` and some failures end the episode without a change of the grid.
    final_anchor = observation.anchor + '\n(over)' * ended
    return base.StepResult(
      observation=None if done else observation,
      reward=SUCCESS_REWARD if success else 0.0,
      valid=valid,
      action=action,
      success=success,
      done=done,
      # MiniGrid's reward: from 1 down to 0.1, the lower the longer it took.
      score=max(0.0, float(reward)) if done else None,
      final_anchor=final_anchor if done else None,
    )

  def close(self) -> None:
    """Closes the level."""
    self._level.close()

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Plays BabyAI's bot with random mistakes; yields each step.

    Args:
      task: the task to play.
      noise: probability that a step's action is drawn uniformly. The bot plans
        anew from there; the episode ends if the mission has become impossible.
      seed: seed of the noise.

    Yields:
      (observation, response) of a step.

    Raises:
      ValueError: in one line, if the level is none of BabyAI's.
    """
    from minigrid.utils import baby_ai_bot

    observation: base.Observation | None = self.reset(task)
    if not self._is_baby_ai:
      raise ValueError(
        f'env.id={self._id}: only BabyAI levels have an expert; must be one of '
        'them for a warm start'
      )
    rng = np.random.default_rng([seed, task.index])
    bot, taken = baby_ai_bot.BabyAIBot(self._level), None
    names = list(self._actions)
    while observation is not None:
      try:
        taken = int(bot.replan(taken))
      # The bot cannot plan, for example because a box has been destroyed.
      except (AssertionError, baby_ai_bot.DisappearedBoxError):
        return
      if taken >= len(names):  # It takes the mission for accomplished.
        return
      if rng.random() < noise:
        taken = int(rng.integers(len(names)))
      action = names[taken]
      response = self._narrator.format_response(f'I {action}.', action)
      yield observation, response
      observation = self.step(response).observation

  def _observe(self) -> base.Observation:
    text = describe(self._level)
    anchor = text if self._anchor == 'observation' else state(self._level)
    return self._narrator.observe(
      text, anchor=anchor, actions=tuple(self._actions)
    )


def tasks(split: str, **kwargs) -> seeds.Seeds:
  """Returns the seeds of a split; accepts and checks the kwargs of `Env`."""
  Env(**kwargs).close()
  return seeds.Seeds(split, kwargs.get('seed', 0))


def describe(level: Any) -> str:
  """Returns what the agent of a level sees and carries.

  Objects are listed from near to far. Of the walls, only those straight ahead,
  to the left and to the right are listed.
  """
  grid, visible = level.gen_obs_grid()
  # The agent is in the middle of the last row and looks up.
  column, row = grid.width // 2, grid.height - 1
  seen = []
  for x in range(grid.width):
    for y in range(grid.height):
      thing, right, forward = grid.get(x, y), x - column, row - y
      if not visible[x, y] or thing is None or not (right or forward):
        continue
      if thing.type != 'wall':
        seen.append((forward + abs(right), forward, right, _name(thing)))
  seen += _walls(grid, visible, column, row)
  places = [f'{name} {_place(*at)}' for _, *at, name in sorted(seen)]
  carried = _name(level.carrying) if level.carrying else 'nothing'
  return f'You see {"; ".join(places) or "nothing"}. You carry {carried}.'


def _walls(
  grid: Any, visible: np.ndarray, column: int, row: int
) -> Iterator[tuple[int, int, int, str]]:
  """Yields (distance, forward, right, name) of the nearest straight walls."""
  for forward, right in ((1, 0), (0, -1), (0, 1)):
    for steps in range(1, max(grid.width, grid.height)):
      x, y = column + right * steps, row - forward * steps
      if not (0 <= x < grid.width and 0 <= y and visible[x, y]):
        break
      thing = grid.get(x, y)
      if thing is not None and thing.type == 'wall':
        yield steps, forward * steps, right * steps, 'a wall'
        break


def _name(thing: Any) -> str:
  if thing.type in ('goal', 'lava'):
    return {'goal': 'the goal', 'lava': 'lava'}[thing.type]
  if thing.type == 'door':
    state = _DOOR_STATES[thing.encode()[2]]
    return f'{"an" if state == "open" else "a"} {state} {thing.color} door'
  return f'a {thing.color} {thing.type}'


def _place(forward: int, right: int) -> str:
  parts = [
    f'{abs(steps)} step{"s" if abs(steps) > 1 else ""} {direction}'
    for steps, direction in (
      (forward, 'forward'),
      (right, 'right' if right > 0 else 'left'),
    )
    if steps
  ]
  return ' and '.join(parts)


def state(level: Any) -> str:
  """Returns everything that the rest of an episode depends on, but the time.

  Walls are left out, because they never change.
  """
  grid, (x, y) = level.grid, level.agent_pos
  carried = level.carrying
  lines = [f'mission: {level.mission}']
  if progress := _progress(getattr(level, 'instrs', None)):
    lines.append(f'done: {progress}')
  lines.append(f'agent: {x},{y} {_DIRECTIONS[level.agent_dir]}')
  lines.append(f'carries: {_content(carried)}')
  lines += [
    f'{x},{y}: {_content(thing)}'
    for x in range(grid.width)
    for y in range(grid.height)
    if (thing := grid.get(x, y)) is not None and thing.type != 'wall'
  ]
  return '\n'.join(lines)


def _content(thing: Any) -> str:
  """Returns the name of a thing, and of what it holds; boxes look alike."""
  if thing is None:
    return 'nothing'
  held = f' with {_name(thing.contains)}' if thing.contains else ''
  return f'{_name(thing)}{held}'


def _progress(instruction: Any) -> str:
  """Returns the parts of a BabyAI instruction that are done; '' if it is one.

  Instructions with two parts remember which part is done.
  """
  if not hasattr(instruction, 'instr_a'):
    return ''
  parts = []
  for part, done in (('instr_a', 'a_done'), ('instr_b', 'b_done')):
    own = _progress(getattr(instruction, part))
    parts.append(f'{getattr(instruction, done)}{own and f" {own}"}')
  return f'({", ".join(parts)})'


def _make(name: str | None) -> Any:
  try:
    import gymnasium
    import minigrid  # noqa: F401  It registers its levels.
  except ImportError as error:
    raise ValueError(
      'env.name=minigrid: minigrid is not installed; run pip install -e '
      "'.[minigrid]'"
    ) from error
  if not name:
    raise ValueError(
      f'env.id={name}: must name a level of MiniGrid or BabyAI, such as '
      'BabyAI-GoToLocal-v0'
    )
  try:
    level = gymnasium.make(name, disable_env_checker=True).unwrapped
  except (gymnasium.error.Error, ImportError) as error:
    reason = ' '.join(str(error).split())
    raise ValueError(f'env.id={name}: cannot be made: {reason}') from error
  if not hasattr(level, 'gen_obs_grid'):
    raise ValueError(f'env.id={name}: no level of MiniGrid or BabyAI')
  return level
