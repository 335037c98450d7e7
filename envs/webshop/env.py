"""WebShop as the trainer sees it: prompts in, responses out, reward 10 or 0.

Joins the shop, its goals, the prompt and the projection. A process has one
catalogue, one index and one list of goals, which all its environments share.
Nothing here knows jax.
"""

import collections
import functools
import json
from collections.abc import Iterator, Sequence

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
)

ANCHORS = ('observation', 'observation_and_actions')
SUCCESS_REWARD = 10.0

# Our name of a split: that of `goals.split`.
SPLITS = {'train': 'train', 'valid': 'dev', 'test': 'test'}


@functools.lru_cache(maxsize=4)
def _catalogue(data_dir: str | None, generator: str) -> products.Catalogue:
  if data_dir:
    return products.load(data_dir)
  return products.from_records(*catalogue.generate(**json.loads(generator)))


@functools.lru_cache(maxsize=4)
def _shop(data_dir: str | None, generator: str) -> engine.Shop:
  return engine.Shop(_catalogue(data_dir, generator))


@functools.lru_cache(maxsize=4)
def _goals(
  data_dir: str | None, generator: str, human: bool
) -> list[goals.Goal]:
  if human and not data_dir:
    raise ValueError(
      'env.human_goals=True: nobody has written instructions for generated '
      'products; give env.data_dir, or human_goals=False'
    )
  return goals.build(_catalogue(data_dir, generator), human=human)


class Goals:
  """The goals of a split, by number."""

  def __init__(self, chosen: Sequence[goals.Goal]):
    self._goals = chosen

  def __len__(self) -> int:
    return len(self._goals)

  def kind(self, index: int) -> str:
    """Returns the category of what is to be bought."""
    return self._goals[index].category

  def __getitem__(self, index: int) -> goals.Goal:
    return self._goals[index]


def _key(generator: dict | None) -> str:
  """Returns generator options in a form that a cache can look up."""
  return json.dumps(generator or {}, sort_keys=True)


def tasks(
  split: str,
  *,
  data_dir: str | None = None,
  generator: dict | None = None,
  human_goals: bool = False,
  reference_sampling: bool = False,
  **others,
) -> Goals:
  """Returns the goals of a split; takes the kwargs of `Env`.

  Raises:
    ValueError: in one line, if there is no such split or nothing in it.
  """
  del others  # They do not change what the goals are.
  if split not in SPLITS:
    raise ValueError(f'split={split}: must be one of {", ".join(SPLITS)}')
  every = _goals(data_dir or None, _key(generator), human_goals)
  chosen = goals.split(every, SPLITS[split])
  if reference_sampling and split == 'train':
    chosen = [*goals.split(every, 'dev'), *chosen]
  if not chosen:
    raise ValueError(
      f'split={split}: none of the {len(every)} goals belongs to it; test has '
      'the first 500, valid the next 1,000, train the rest'
    )
  return Goals(chosen)


class Env:
  """One customer at a time.

  Args:
    data_dir: folder of the official files; None or '' generates a shop.
    generator: options of `catalogue.generate`, for a generated shop.
    human_goals: whether to take the instructions that people wrote.
    reference_sampling: whether to train on the goals of `valid` as well, as
      the released code does.
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
    self._source = (data_dir or None, _key(generator))
    self._goal_options = {
      'data_dir': data_dir,
      'generator': generator,
      'human_goals': human_goals,
      'reference_sampling': reference_sampling,
    }
    self._splits: dict[str, Goals] = {}
    self._max_steps = max_steps
    self._prompt_style = prompt_style
    self._require_think = require_think
    self._require_admissible = require_admissible
    self._anchor = anchor
    self._history: collections.deque[turns.Turn] = collections.deque(
      maxlen=history_length
    )
    self._session = engine.Session(_shop(*self._source))
    self._page: engine.Page
    self._parts: list[str] = []
    self._task = ''
    self._step = 0

  def goal(self, task: base.Task) -> goals.Goal:
    """Returns what is to be bought."""
    if task.split not in self._splits:
      self._splits[task.split] = tasks(task.split, **self._goal_options)
    return self._splits[task.split][task.index]

  def prepare(self, task: base.Task) -> None:
    """Makes the goals ready; the shop is."""
    self.goal(task)

  def reset(self, task: base.Task) -> base.Observation:
    """Opens the shop's first page."""
    goal = self.goal(task)
    self._task = goal.instruction_text
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
    return base.StepResult(
      observation=None if done else self._observe(),
      reward=SUCCESS_REWARD if success else 0.0,
      valid=valid,
      action=action,
      success=success,
      done=done,
      metrics={'inadmissible_action_rate': float(not admissible)},
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
    shopper = oracle.Shopper(_shop(*self._source), self.goal(task))
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

    anchor = prompts.describe(self._parts, self._page.clickables)
    if self._anchor == 'observation_and_actions':
      anchor = '\n'.join((anchor, *actions))
    return base.Observation(
      prompt=prompt(tuple(self._history)),
      short_prompt=prompt(()),
      anchor=anchor,
      text=prompts.lay_out(self._parts, self._page.clickables),
      task=self._task,
      actions=actions,
    )
