"""WebShop as the trainer sees it: prompts in, responses out, reward 10 or 0.

Joins the shop, its goals, the prompt and the projection. A process has one
catalogue, one index and one list of goals, which all its environments share.
Nothing here knows jax.
"""

import collections
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator

import numpy as np

from envs import base, turns
from envs.webshop import (
  catalogue,
  engine,
  goals,
  oracle,
  pages,
  products,
  prompts,
  titles,
)

ANCHORS = ('observation', 'observation_and_actions')
SUCCESS_REWARD = 10.0

# Our name of a split: that of `goals.split`.
SPLITS = {'train': 'train', 'valid': 'dev', 'test': 'test'}

# In the released code each group has a worker with a list of goals of its own,
# of seeds 0, 1, ...: 16 groups of 8 episodes, or 128 of one episode for PPO. So
# has each of the 128 episodes of its validation, of seeds 1,000, 1,001, ...
_REFERENCE_LISTS = 128
_REFERENCE_PANEL = 128
_REFERENCE_VALIDATION = 1_000
_GLOBAL = 0
_HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class _Source:
  """What is sold and wanted; equal ones share what is made from them."""

  data_dir: str | None
  num_products: int | None
  generator: str
  human_goals: bool
  reference_sampling: bool


@functools.lru_cache(maxsize=4)
def _catalogue(source: _Source) -> products.Catalogue:
  if source.data_dir:
    return products.load(source.data_dir, num_products=source.num_products)
  # What a generated shop is a function of: the program and its arguments.
  program = [path.read_bytes() for path in sorted(_HERE.glob('*.py'))]
  make = functools.partial(catalogue.generate, **json.loads(source.generator))
  return products.stored((program, source.generator), make)


# A list of goals and the shop go together: both draw prices from the seed.
@functools.lru_cache(maxsize=4 + _REFERENCE_LISTS + _REFERENCE_PANEL)
def _shop(source: _Source, seed: int) -> engine.Shop:
  return engine.Shop(_catalogue(source), seed=seed)


@functools.lru_cache(maxsize=4 + _REFERENCE_LISTS + _REFERENCE_PANEL)
def _goals(source: _Source, seed: int) -> goals.Goals:
  if source.human_goals and not source.data_dir:
    raise ValueError(
      'env.human_goals=True: nobody has written instructions for generated '
      'products; give env.data_dir, or human_goals=False'
    )
  make = goals.reference if source.reference_sampling else goals.build
  return make(_catalogue(source), human=source.human_goals, seed=seed)


class Goals:
  """The goals of a split, by number.

  With `reference_sampling`, those of the released code's workers: list after
  list in `train`; in `test`, the one goal that each of the 128 workers of its
  validation plays first (it draws others every time; this panel stays).

  Attributes:
    draw: with `reference_sampling`, what a run trains on; else None. Takes an
      iteration and a number of groups; returns numbers of goals. Group i always
      asks list i, as in the released code with seed 0.

  Raises:
    ValueError: in one line, if there is no such split or nothing in it.
  """

  draw: Callable[[int, int], list[int]] | None = None

  def __init__(self, split: str, source: _Source):
    if split not in SPLITS:
      raise ValueError(f'split={split}: must be one of {", ".join(SPLITS)}')
    self._source = source
    # (seed of the list, its first goal here, how many) one after the other.
    self._parts = [(_GLOBAL, *goals.SPLITS[SPLITS[split]])]
    available = len(_goals(source, _GLOBAL))  # as in any other list
    if source.reference_sampling:
      self._parts = self._as_released(split, available)
    last = self._parts[-1][2] or available
    self._size = min(last, available) - self._parts[-1][1]
    if self._size <= 0:
      raise ValueError(
        f'split={split}: none of the {available} goals belongs to it; test has '
        'the first 500, valid the next 1,000, train the rest'
      )

  def _as_released(self, split: str, available: int) -> list[tuple]:
    validated = goals.SPLITS['test'][1]
    if split == 'valid':
      raise ValueError(
        'split=valid: the released code trains on those goals; with '
        'env.reference_sampling=True must be one of train, test'
      )
    if split == 'train':
      self.draw = self._draw
      return [(seed, validated, None) for seed in range(_REFERENCE_LISTS)]
    rng = np.random.RandomState(_REFERENCE_VALIDATION)
    size = min(_REFERENCE_PANEL, validated, available)
    chosen = rng.choice(min(validated, available), size=size, replace=False)
    return [
      (_REFERENCE_VALIDATION + n, place, place + 1)
      for n, place in enumerate(chosen.tolist())
    ]

  def _draw(self, iteration: int, groups: int) -> list[int]:
    if groups > _REFERENCE_LISTS:
      raise ValueError(
        f'rollout.groups={groups}: with env.reference_sampling=True at most '
        f'{_REFERENCE_LISTS}, each with a list of goals of its own'
      )
    rng = np.random.RandomState(0)
    for _ in range(iteration + 1):
      chosen = rng.choice(self._size, size=groups, replace=False)
    return [n * self._size + int(place) for n, place in enumerate(chosen)]

  def __len__(self) -> int:
    return len(self._parts) * self._size

  def kind(self, index: int) -> str:
    """Returns the category of what is to be bought."""
    return self[index].category

  def seed(self, index: int) -> int:
    """Returns the seed of the list that a goal is from, and of its shop."""
    return self._parts[index // self._size][0]

  def __getitem__(self, index: int) -> goals.Goal:
    if not 0 <= index < len(self):
      raise IndexError(f'{index}: there are {len(self)} goals')
    seed, first, _ = self._parts[index // self._size]
    return _goals(self._source, seed)[first + index % self._size]


def _source(
  data_dir: str | None = None,
  num_products: int | None = None,
  generator: dict | None = None,
  human_goals: bool = False,
  reference_sampling: bool = False,
  **others,
) -> _Source:
  """Returns those of the arguments of `Env` that say what goals there are."""
  del others
  return _Source(
    data_dir=data_dir or None,
    num_products=num_products,
    # In a form that a cache can look up.
    generator=json.dumps(generator or {}, sort_keys=True),
    human_goals=human_goals,
    reference_sampling=reference_sampling,
  )


def tasks(split: str, **kwargs) -> Goals:
  """Returns the goals of a split; takes the kwargs of `Env`."""
  return Goals(split, _source(**kwargs))


class Env:
  """One customer at a time.

  Args:
    data_dir: folder of the official files; None or '' generates a shop.
    num_products: of the official files; see `products.load`.
    generator: options of `catalogue.generate`, for a generated shop.
    human_goals: whether to take the instructions that people wrote.
    reference_sampling: whether goals are drawn as in the released code, where
      each of 16 groups has a list with an order and prices of its own and goals
      of the training LEAK into the validation; see `Goals`, `goals.reference`.
    max_steps: turns after which an unfinished episode ends.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `prompts.STYLES`.
    require_think: whether a response must hold a `<think>` part.
    require_admissible: whether an inadmissible action counts as invalid.
    anchor: one of ANCHORS; what makes two states the same (GiGPO, Eq. 6). The
      options chosen are not on the page, so they are no part of it.
  """

  def __init__(
    self,
    *,
    data_dir: str | None = None,
    num_products: int | None = None,
    generator: dict | None = None,
    human_goals: bool = False,
    reference_sampling: bool = False,
    max_steps: int = 15,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
    require_admissible: bool = False,
    anchor: str = 'observation',
  ):
    if anchor not in ANCHORS:
      raise ValueError(f'anchor={anchor}: must be one of {", ".join(ANCHORS)}')
    self._source = _source(
      data_dir, num_products, generator, human_goals, reference_sampling
    )
    # Here, while a worker starts: shop, goals and tagger take their time.
    _shop(self._source, _GLOBAL)
    _goals(self._source, _GLOBAL)
    titles.tagger()
    self._splits: dict[str, Goals] = {}
    self._max_steps = max_steps
    self._prompt_style = prompt_style
    self._require_think = require_think
    self._require_admissible = require_admissible
    self._anchor = anchor
    self._history: collections.deque[turns.Turn] = collections.deque(
      maxlen=history_length
    )
    self._session: engine.Session
    self._page: engine.Page
    self._parts: list[str] = []
    self._task = ''
    self._step = 0

  def goal(self, task: base.Task) -> goals.Goal:
    """Returns what is to be bought."""
    return self._split(task)[task.index]

  def shop(self, task: base.Task) -> engine.Shop:
    """Returns where it is to be bought."""
    return _shop(self._source, self._split(task).seed(task.index))

  def _split(self, task: base.Task) -> Goals:
    if task.split not in self._splits:
      self._splits[task.split] = Goals(task.split, self._source)
    return self._splits[task.split]

  def prepare(self, task: base.Task) -> None:
    """Makes goals and shop ready."""
    self.goal(task)
    self.shop(task)

  def reset(self, task: base.Task) -> base.Observation:
    """Opens the shop's first page."""
    goal = self.goal(task)
    self._task = goal.instruction_text
    self._session = engine.Session(self.shop(task))
    self._turn_to(self._session.reset(goal))
    self._history.clear()
    self._step = 0
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Parses the response, plays its action, and says what came of it."""
    action, valid = prompts.project(response, require_think=self._require_think)
    admissible = prompts.admits(self._actions(), action)
    if self._require_admissible:
      valid = valid and admissible
    self._history.append(turns.Turn(self._shown(), action))
    self._turn_to(self._session.step(action))
    self._step += 1
    bought = self._page.done
    success = bought and self._page.reward == 1.0
    done = bought or self._step >= self._max_steps
    score = float(self._page.reward) if bought else 0.0
    metrics = {'inadmissible_action_rate': float(not admissible)}
    if done:
      metrics['webshop_score'] = score
    return base.StepResult(
      observation=None if done else self._observe(),
      final_anchor=self._where() if done else None,
      reward=SUCCESS_REWARD if success else 0.0,
      valid=valid,
      action=action,
      success=success,
      done=done,
      metrics=metrics,
      score=score if done else None,
    )

  def close(self) -> None:
    """Holds nothing of its own."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[str, str]]:
    """Yields (prompt, response) of an oracle that errs now and then.

    Args:
      task: the goal to reach.
      noise: probability that a step's action is a uniformly drawn admissible
        one instead of the oracle's, or a search for one word. The oracle goes
        on from where it led, unless something was bought.
      seed: of the noise.
    """
    rng = np.random.default_rng([seed, task.index])
    observation: base.Observation | None = self.reset(task)
    shopper = oracle.Shopper(self.shop(task), self.goal(task))
    while observation is not None:
      thought, action = shopper.act(self._page)
      if rng.random() < noise:
        actions = self._actions()
        action = actions[rng.integers(len(actions))]
        if action == prompts.SEARCH:
          words = oracle.phrase(self.goal(task)).lower().split()
          action = f'search[{words[rng.integers(len(words))]}]'
      shopper.done(action)
      think = f'<think>{thought}</think>' if self._require_think else ''
      response = f'{think}<action>{action}</action>'
      yield observation.prompt, response
      observation = self.step(response).observation

  def _turn_to(self, page: engine.Page) -> None:
    self._page = page
    self._parts = pages.split(page.text, self._task)

  def _actions(self) -> tuple[str, ...]:
    return prompts.actions(self._page.has_search_bar, self._page.clickables)

  def _shown(self) -> str:
    return prompts.describe(
      self._parts, self._page.clickables, style=self._prompt_style
    )

  def _where(self) -> str:
    anchor = prompts.describe(self._parts, self._page.clickables)
    if self._anchor == 'observation_and_actions':
      return '\n'.join((anchor, *self._actions()))
    return anchor

  def _observe(self) -> base.Observation:
    actions = self._actions()

    def prompt(history: tuple[turns.Turn, ...]) -> str:
      return prompts.build(
        task=self._task,
        observation=self._shown(),
        admissible=actions,
        history=history,
        step=self._step,
        style=self._prompt_style,
        require_think=self._require_think,
      )

    return base.Observation(
      prompt=prompt(tuple(self._history)),
      short_prompt=prompt(()),
      anchor=self._where(),
      text=prompts.lay_out(self._parts, self._page.clickables),
      task=self._task,
      actions=actions,
    )
