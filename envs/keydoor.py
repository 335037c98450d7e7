"""Keys and doors in text: a grid whose difficulty is set by a few numbers.

Rooms lie in a row, with a locked door between neighbours. The agent carries
one key at a time, opens the doors from left to right, and leaves by the exit in
the last room. `Env` sets the number of doors and decoys, the share of traps,
the step limit and what observations hide, so that a study can change one of
them and keep the others.

A state has three parts: position, key in hand, opened doors. Its optimal value
is known exactly; see `keydoor_levels.optimal_values`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from envs import base, checks, keydoor_levels, narrator, seeds
from envs.keydoor_levels import ACTIONS, Level, Options, State

ANCHORS = ('observation', 'observation_and_actions', 'state')
ALIASES = ('position', 'held')
SUCCESS_REWARD = 10.0

_ROLE = 'You are an expert agent operating in a building with locked doors.'
_RULES = """\
Rooms of {rows} x {columns} cells lie in a row, from left to right. Cells are \
named by column and row, such as b3: a is the leftmost column and 1 the top \
row. A wall of one column separates two rooms; its only opening is a locked \
door.
You walk one cell a step: up, down, left, right. take: pick up the key in your \
cell. You carry one key; a key that you carried before returns to its cell. \
open: open the door to your right with the key of its colour, which stays in \
the lock. A key that fits no door is of no use. Whoever enters a trap cannot \
leave it."""


def check_options(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each wrong option."""
  for name in kwargs.get('aliased') or ():
    yield from checks.one_of({'aliased': name}, aliased=ALIASES)
  known = [field.name for field in dataclasses.fields(Options)]
  for name in set(kwargs.get('generator') or ()) - set(known):
    yield f'env.generator.{name}: unknown; must be one of {", ".join(known)}'


def conflicts(config: Any) -> Iterator[str]:
  """Yields options outside `config.env` that levels do not support."""
  if config.algorithm.anchor == 'similarity':
    yield (
      'algorithm.anchor=similarity: texts of different states of '
      'env.name=keydoor differ by a character; must be an anchor that compares '
      'texts exactly, such as observation'
    )


class Levels(seeds.Seeds):
  """The levels of a split, by task index.

  Raises:
    ValueError: in one line, if the split is unknown.
  """

  def __init__(self, split: str, options: Options):
    super().__init__(split, options.seed)
    self._split, self._options = split, options

  def level(self, index: int) -> Level:
    """Returns the level of a task."""
    return keydoor_levels.generate(self._split, self[index], self._options)

  def task_type(self, index: int) -> str:
    """Returns the task type: the third of the length range of its solution."""
    steps = self.level(index).steps
    return seeds.length_type(steps, self._options.solution_steps)


def tasks(split: str, **kwargs) -> Levels:
  """Returns the levels of a split; accepts the kwargs of `Env`."""
  return Env(**kwargs).levels(split)


class Env:
  """The environment of keys and doors.

  Args:
    generator: arguments of `Options`, which set the levels.
    max_steps: step limit of an episode; at least the longest solution. It does
      not change the levels.
    aliased: parts of the state, from ALIASES, that observations hide; the
      position is then known up to the room.
    alias_prompts: whether texts in prompts hide these parts, too; the list of
      admissible actions still depends on them. False: anchors alone hide them,
      so that the task stays the same.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must contain a `<think>` part.
    anchor: one of ANCHORS; identifies a state (GiGPO, Eq. 6). 'state' is the
      full state, whatever observations hide.

  Raises:
    ValueError: in one line, if an argument is out of range.
  """

  def __init__(
    self,
    *,
    generator: Mapping[str, Any] | None = None,
    max_steps: int = 60,
    aliased: Sequence[str] = (),
    alias_prompts: bool = True,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
    anchor: str = 'observation',
  ):
    for problem in check_options({'aliased': aliased, 'generator': generator}):
      raise ValueError(problem)
    self._options = options = Options(**(generator or {}))
    if max_steps < options.solution_steps[1]:
      raise ValueError(
        f'env.max_steps={max_steps}: fewer than the longest solution; must be '
        f'at least the maximum of generator.solution_steps='
        f'{options.solution_steps}'
      )
    # Raises here, before any episode, if the options allow no level.
    for split in seeds.SPLITS:
      self.levels(split).level(0)
    self._max_steps, self._anchor = max_steps, anchor
    self._aliased, self._alias_prompts = frozenset(aliased), alias_prompts
    self._narrator = narrator.Narrator(
      _ROLE,
      rules=_RULES.format(rows=options.room[0], columns=options.room[1]),
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
    )
    self._level: Level
    self._state: State

  def levels(self, split: str) -> Levels:
    """Returns the levels of a split."""
    return Levels(split, self._options)

  def prepare(self, task: base.Task) -> None:
    """Generates the level into the cache of `generate`."""
    self.levels(task.split).level(task.index)

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode in the task's level."""
    self._level = self.levels(task.split).level(task.index)
    self._state = self._level.start
    self._narrator.reset(_describe_level(self._level))
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Acts; an action that is not admissible only uses up a step."""
    action, valid = self._narrator.parse(response)
    valid = valid and action in ACTIONS
    previous, level = self._state, self._level
    if valid:
      self._state = keydoor_levels.apply(level, previous, action)
    self._narrator.record_action(action)
    success, over = self._state.cell == level.exit, level.is_over(self._state)
    done = over or self._narrator.step >= self._max_steps
    metrics = {'inadmissible_action_rate': float(self._state == previous)}
    if done:
      metrics['trap_rate'] = float(over and not success)
    return base.StepResult(
      observation=None if done else self._observe(),
      final_anchor=self._final_anchor() if done else None,
      reward=SUCCESS_REWARD if success else 0.0,
      valid=valid,
      action=action,
      success=success,
      done=done,
      metrics=metrics,
    )

  def close(self) -> None:
    """Does nothing; there is nothing to free."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Plays a shortest solution with random mistakes; yields each step.

    The expert knows the full state, whatever observations hide.

    Args:
      task: the level to play.
      noise: probability that a step's action is drawn uniformly from the
        admissible ones. The episode is left unfinished if no solution fits into
        the remaining steps.
      seed: seed of the noise.

    Yields:
      (observation, response) of a step.
    """
    rng = np.random.default_rng([seed, task.index])
    observation: base.Observation | None = self.reset(task)
    graph = keydoor_levels.make_graph(self._level)
    while observation is not None:
      plan = keydoor_levels.shortest_plan(graph, self._state)
      steps_left = self._max_steps - self._narrator.step
      if plan is None or len(plan) > steps_left:
        return
      action, thought = plan[0], f'To {self._subgoal(plan)}.'
      if rng.random() < noise:
        actions = keydoor_levels.admissible(self._level, self._state)
        action = actions[rng.integers(len(actions))]
      response = self._narrator.format_response(thought, action)
      yield observation, response
      observation = self.step(response).observation

  def _subgoal(self, plan: Sequence[str]) -> str:
    """Returns what a plan reaches first: a key, a door or the exit."""
    level, state = self._level, self._state
    for action in plan:
      if action in ('take', 'open'):
        place = state.cell + (action == 'open')
        key = (level.keys if action == 'take' else level.doors).index(place)
        thing = 'key' if action == 'take' else 'door'
        return f'the {level.colours[key]} {thing} at {level.name(place)}'
      state = keydoor_levels.apply(level, state, action)
    return f'the exit at {level.name(level.exit)}'

  def _observe(self) -> base.Observation:
    full = _describe(self._level, self._state, frozenset())
    aliased = _describe(self._level, self._state, self._aliased)
    actions = keydoor_levels.admissible(self._level, self._state)
    anchor = {
      'observation': aliased,
      'observation_and_actions': f'{aliased} {", ".join(actions)}',
      'state': full,
    }[self._anchor]
    text = aliased if self._alias_prompts else full
    return self._narrator.observe(text, anchor=anchor, actions=actions)

  def _final_anchor(self) -> str:
    if not self._level.is_over(self._state):
      return self._observe().anchor
    success = self._state.cell == self._level.exit
    return 'You are at the exit.' if success else 'You are in a trap.'


def _describe_level(level: Level) -> str:
  """Returns the task: everything of a level that never changes."""
  names = sorted(zip(level.colours, level.keys, strict=True))
  keys = ', '.join(f'{colour} {level.name(cell)}' for colour, cell in names)
  doors = ', '.join(
    f'{colour} {level.name(cell)}'
    for colour, cell in zip(level.colours, level.doors, strict=False)
  )
  traps = ', '.join(level.name(cell) for cell in sorted(level.traps))
  return (
    f'go to the exit at {level.name(level.exit)}. Keys: {keys or "none"}. '
    f'Doors: {doors or "none"}. Traps: {traps or "none"}.'
  )


def _describe(level: Level, state: State, hidden: frozenset[str]) -> str:
  """Returns the state as text, without its hidden parts."""
  pitch = (level.size[1] + 1) // (len(level.doors) + 1)
  place = f'at {level.name(state.cell)}'
  if 'position' in hidden:
    place = f'in room {state.cell % level.size[1] // pitch + 1}'
  held = 'nothing' if state.held < 0 else f'the {level.colours[state.held]} key'
  hand = '' if 'held' in hidden else f' You hold {held}.'
  return f'You are {place}.{hand} Open doors: {state.opened}.'
