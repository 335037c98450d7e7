"""The WebShop environment: prompts, responses, and a reward of 10 or 0.

It combines the shop, its goals, the prompts and the parsing of responses. All
environments of a process share one catalogue, one index and one list of goals.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from envs import base, checks, narrator
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

ANCHORS = ('observation', 'observation_and_actions', 'state')
DATA = base.Data(
  'WEBSHOP_DATA', 'no WebShop files; run `python -m envs.webshop.download`'
)
CONTEXTS = narrator.CONTEXTS
SUCCESS_REWARD = 10.0

# Split of the environment -> split of `goals.SPLITS`.
SPLITS = {'train': 'train', 'valid': 'dev', 'test': 'test'}

# In the released code each group has a worker with its own list of goals, of
# seeds 0, 1, ...: 16 groups of 8 episodes, or 128 of one episode for PPO. Each
# of its 128 validation episodes also has a list, of seeds 1,000, 1,001, ...
_REFERENCE_LISTS = 128
_REFERENCE_VALIDATION_TASKS = 128
_REFERENCE_VALIDATION_SEED = 1_000
_GLOBAL_SEED = 0  # of the one list without reference_sampling
_PACKAGE = pathlib.Path(__file__).parent

PRESETS = {
  'sampo': {'algorithm.anchor': 'observation_and_actions'},
  # The released code validates on 128 goals that it also trains on. 0: all.
  'reference_code': {
    'env.reference_sampling': True,
    'evaluation.num_tasks': lambda num_tasks: min(
      num_tasks or _REFERENCE_VALIDATION_TASKS, _REFERENCE_VALIDATION_TASKS
    ),
  },
}


def check_options(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each wrong option."""
  yield from checks.at_least(kwargs, '; None is all', num_products=1)


def conflicts(config: Any) -> Iterator[str]:
  """Yields options that need an order of tasks of their own."""
  if not config.env.get('reference_sampling'):
    return
  if config.tasks.draw != 'epochs':
    yield (
      f'tasks.draw={config.tasks.draw}: env.reference_sampling sets the order '
      'of tasks; must be epochs'
    )
  if config.filter.drop_zero_variance:
    yield (
      'filter.drop_zero_variance=True: env.reference_sampling sets the order '
      'of tasks, without refills; must be False'
    )
  if config.rollout.carry_over:
    yield (
      f'rollout.carry_over={config.rollout.carry_over}: env.reference_sampling '
      'starts a task of each list in each iteration; must be 0'
    )


@dataclasses.dataclass(frozen=True)
class _Source:
  """The arguments that determine shop and goals; key of the shared caches."""

  data_dir: str | None
  num_products: int | None
  generator: str
  human_goals: bool
  reference_sampling: bool


@functools.lru_cache(maxsize=4)
def _catalogue(source: _Source) -> products.Catalogue:
  if source.data_dir:
    return products.load(source.data_dir, num_products=source.num_products)
  # A generated shop depends on this package's source and the options.
  code = [path.read_bytes() for path in sorted(_PACKAGE.glob('*.py'))]
  make = functools.partial(catalogue.generate, **json.loads(source.generator))
  return products.cached((code, source.generator), make)


# A shop and its goals must have the same seed: both draw prices from it.
@functools.lru_cache(maxsize=4 + _REFERENCE_LISTS + _REFERENCE_VALIDATION_TASKS)
def _shop(source: _Source, seed: int) -> engine.Shop:
  return engine.Shop(_catalogue(source), seed=seed)


@functools.lru_cache(maxsize=4 + _REFERENCE_LISTS + _REFERENCE_VALIDATION_TASKS)
def _goals(source: _Source, seed: int) -> goals.Goals:
  if source.human_goals and not source.data_dir:
    raise ValueError(
      'env.human_goals=True: generated products have no human-written '
      'instructions; set env.data_dir, or env.human_goals=False'
    )
  make = goals.reference if source.reference_sampling else goals.build
  return make(_catalogue(source), human=source.human_goals, seed=seed)


class Goals:
  """The goals of a split, by task index.

  With `reference_sampling`, these are the goals of the released code's workers.
  The split `train` concatenates the workers' lists. The split `test` has the
  goal that each of the 128 validation workers plays first. The released code
  draws new validation goals every time; these are fixed.

  Attributes:
    draw: function of (iteration, number of groups) that returns the task
      indices to train on, with `reference_sampling`; else None. As in the
      released code with seed 0, group i always draws from list i.

  Raises:
    ValueError: in one line, if the split is unknown or has no goals.
  """

  draw: Callable[[int, int], list[int]] | None = None

  def __init__(self, split: str, source: _Source):
    if split not in SPLITS:
      raise ValueError(f'split={split}: must be one of {", ".join(SPLITS)}')
    self._source = source
    # The split concatenates these ranges: (seed of the list, first, last).
    self._ranges = [(_GLOBAL_SEED, *goals.SPLITS[SPLITS[split]])]
    # All lists have the same length.
    num_goals = len(_goals(source, _GLOBAL_SEED))
    if source.reference_sampling:
      self._ranges = self._reference_ranges(split, num_goals)
    last = self._ranges[-1][2] or num_goals
    self._size = min(last, num_goals) - self._ranges[-1][1]
    if self._size <= 0:
      raise ValueError(
        f'split={split}: has none of the {num_goals} goals; test has the first '
        '500, valid the next 1,000, train the rest; use more products or '
        'another split'
      )

  def _reference_ranges(self, split: str, num_goals: int) -> list[tuple]:
    num_validation = goals.SPLITS['test'][1]
    if split == 'valid':
      raise ValueError(
        'split=valid: the released code trains on those goals; with '
        'env.reference_sampling=True must be one of train, test'
      )
    if split == 'train':
      self.draw = self._draw
      return [(seed, num_validation, None) for seed in range(_REFERENCE_LISTS)]
    rng = np.random.RandomState(_REFERENCE_VALIDATION_SEED)
    size = min(_REFERENCE_VALIDATION_TASKS, num_validation, num_goals)
    chosen = rng.choice(
      min(num_validation, num_goals), size=size, replace=False
    )
    return [
      (_REFERENCE_VALIDATION_SEED + n, index, index + 1)
      for n, index in enumerate(chosen.tolist())
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
    return [n * self._size + int(index) for n, index in enumerate(chosen)]

  def __len__(self) -> int:
    return len(self._ranges) * self._size

  def task_type(self, index: int) -> str:
    """Returns the task type: the category of the goal product."""
    return self[index].category

  def seed(self, index: int) -> int:
    """Returns the seed of a goal's list, which is also that of its shop."""
    return self._ranges[index // self._size][0]

  def __getitem__(self, index: int) -> goals.Goal:
    if not 0 <= index < len(self):
      raise IndexError(
        f'{index}: there are {len(self)} goals; must be from 0 to '
        f'{len(self) - 1}'
      )
    seed, first, _ = self._ranges[index // self._size]
    return _goals(self._source, seed)[first + index % self._size]


def _source(
  data_dir: str | None = None,
  num_products: int | None = None,
  generator: dict | None = None,
  human_goals: bool = False,
  reference_sampling: bool = False,
  **other_kwargs,
) -> _Source:
  """Returns the arguments of `Env` that determine shop and goals."""
  del other_kwargs
  return _Source(
    data_dir=data_dir or None,
    num_products=num_products,
    # As a string, because a dictionary is not hashable.
    generator=json.dumps(generator or {}, sort_keys=True),
    human_goals=human_goals,
    reference_sampling=reference_sampling,
  )


def tasks(split: str, **kwargs) -> Goals:
  """Returns the goals of a split; accepts the kwargs of `Env`."""
  return Goals(split, _source(**kwargs))


class Env:
  """The WebShop environment.

  Args:
    data_dir: folder of the official files; None or '' generates a shop.
    num_products: number of official products; see `products.load`.
    generator: options of `catalogue.generate`, for a generated shop.
    human_goals: whether to use the human-written instructions.
    reference_sampling: whether to draw goals as the released code does. There,
      each group has its own list with its own order and prices, and training
      goals LEAK into the validation; see `Goals` and `goals.reference`.
    max_steps: step limit of an episode.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must contain a `<think>` part.
    context: one of `narrator.CONTEXTS`.
    require_admissible: whether an inadmissible action counts as invalid.
    anchor: state by which steps are grouped (GiGPO, Eq. 6); one of ANCHORS.
      'state' adds the product and its chosen options, which the page does not
      show, to the page. The query is no part of it; it only matters for the
      way back.

  Raises:
    ValueError: in one line, if an argument or the data is not valid.
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
    context: str = 'history',
    require_admissible: bool = False,
    anchor: str = 'observation',
  ):
    if anchor not in ANCHORS:
      raise ValueError(f'anchor={anchor}: must be one of {", ".join(ANCHORS)}')
    self._source = _source(
      data_dir, num_products, generator, human_goals, reference_sampling
    )
    # Loaded here because they take seconds to minutes: a worker's start may
    # take longer than a step.
    _shop(self._source, _GLOBAL_SEED)
    _goals(self._source, _GLOBAL_SEED)
    titles.tagger()
    self._splits: dict[str, Goals] = {}
    self._max_steps = max_steps
    self._prompt_style = prompt_style
    self._transcript = narrator.Transcript(
      prompts.build,
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      context=context,
      unparsed_characters=prompts.UNPARSED_CHARACTERS,
    )
    self._require_admissible = require_admissible
    self._anchor_type = anchor
    self._session: engine.Session
    self._page: engine.Page
    self._parts: list[str] = []
    self._task = ''

  def goal(self, task: base.Task) -> goals.Goal:
    """Returns the goal of a task."""
    return self._split(task)[task.index]

  def shop(self, task: base.Task) -> engine.Shop:
    """Returns the shop of a task."""
    return _shop(self._source, self._split(task).seed(task.index))

  def _split(self, task: base.Task) -> Goals:
    if task.split not in self._splits:
      self._splits[task.split] = Goals(task.split, self._source)
    return self._splits[task.split]

  def prepare(self, task: base.Task) -> None:
    """Loads the goals and the shop of a task."""
    self.goal(task)
    self.shop(task)

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode on the search page."""
    goal = self.goal(task)
    self._task = goal.instruction_text
    self._session = engine.Session(self.shop(task))
    self._set_page(self._session.reset(goal))
    self._transcript.reset(self._task)
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Parses the response, executes its action and returns the result."""
    action, valid = self._transcript.parse(response)
    admissible = prompts.admits(self._actions(), action)
    if self._require_admissible:
      valid = valid and admissible
    self._transcript.record_action(action)
    self._set_page(self._session.step(action))
    bought = self._page.done
    success = bought and self._page.reward == 1.0
    done = bought or self._transcript.step >= self._max_steps
    score = float(self._page.reward) if bought else 0.0
    metrics = {'inadmissible_action_rate': float(not admissible)}
    if done:
      metrics['webshop_score'] = score
    return base.StepResult(
      observation=None if done else self._observe(),
      final_anchor=self._anchor() if done else None,
      reward=SUCCESS_REWARD if success else 0.0,
      valid=valid,
      action=action,
      success=success,
      done=done,
      metrics=metrics,
      score=score if done else None,
    )

  def close(self) -> None:
    """Does nothing; shop and goals are shared by the process."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Plays the oracle with random mistakes; yields each step.

    Args:
      task: the task to play.
      noise: probability that a uniformly drawn admissible action replaces the
        oracle's; a drawn search uses one random word. The oracle continues from
        the resulting page, unless a product was bought.
      seed: seed of the noise.

    Yields:
      (input, response) of a step.
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
      shopper.record(action)
      response = self._transcript.format_response(thought, action)
      yield observation, response
      observation = self.step(response).observation

  def _set_page(self, page: engine.Page) -> None:
    self._page = page
    self._parts = pages.split(page.text, self._task)

  def _actions(self) -> tuple[str, ...]:
    return prompts.actions(self._page.has_search_bar, self._page.clickables)

  def _anchor(self) -> str:
    anchor = prompts.describe(self._parts, self._page.clickables)
    if self._anchor_type == 'observation_and_actions':
      return '\n'.join((anchor, *self._actions()))
    if self._anchor_type == 'state':
      product, options = self._page.product, self._page.options
      chosen = [f'{name}: {value}' for name, value in sorted(options.items())]
      return '\n'.join(filter(None, (anchor, product, *chosen)))
    return anchor

  def _observe(self) -> base.Observation:
    parts, clickables = self._parts, self._page.clickables
    return self._transcript.observe(
      prompts.lay_out(parts, clickables),
      anchor=self._anchor(),
      actions=self._actions(),
      shown=prompts.describe(parts, clickables, style=self._prompt_style),
    )
