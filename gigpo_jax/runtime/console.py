"""Log lines and progress bars, shown by the main process only."""

import time
from collections.abc import Callable, Iterable

import tqdm

from gigpo_jax.runtime import distributed


def log(line: str) -> None:
  """Prints a line; see `runtime.output` if it cannot be written."""
  if distributed.is_main_process():
    print(line, flush=True)


def progress_bar(
  steps: Iterable | None = None, *, hide: bool = False, **kwargs
) -> tqdm.tqdm:
  """Returns a progress bar; hidden on request or without a terminal."""
  disable = True if hide or not distributed.is_main_process() else None
  return tqdm.tqdm(steps, leave=False, disable=disable, **kwargs)


def count_episodes(
  bar: tqdm.tqdm, num_tokens: Callable[[], int]
) -> Callable[[int], None]:
  """Returns a function that adds finished episodes to a progress bar.

  Args:
    bar: the bar, which also shows the tokens per second.
    num_tokens: returns the number of tokens sampled so far.
  """
  start = time.monotonic()

  def add(episodes: int) -> None:
    rate = num_tokens() / max(time.monotonic() - start, 1e-9)
    bar.set_postfix_str(f'{rate:.0f} tokens/s', refresh=False)
    bar.update(episodes)

  return add


class EndlessNotice:
  """Prints a line if no episode has ended for a minute.

  Long episodes are no error, so the time until the next line doubles with each
  line, also over several rollouts.
  """

  def __init__(self):
    self._wait_secs = 60.0
    self._since = time.monotonic()

  def restart(self) -> None:
    """Counts the time from now on: a rollout starts, or an episode ended."""
    self._since = time.monotonic()

  def check(self, reason: Callable[[], str]) -> None:
    """Prints the line if it is due.

    Args:
      reason: returns what the episodes wait for.
    """
    if time.monotonic() - self._since < self._wait_secs:
      return
    # Of any process: the main one may have no episodes left.
    print(
      f'no episode has ended for {self._wait_secs:.0f} s; {reason()}',
      flush=True,
    )
    self._wait_secs *= 2
